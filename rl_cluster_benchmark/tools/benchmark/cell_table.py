"""The live table of a benchmark: what is done, running and to come, and when it will end."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import sys
import time
from collections.abc import Sequence

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.tools.analysis.runs import UnusableRunError, load_run
from rl_cluster_benchmark.tools.benchmark.cells import CellProgress
from rl_cluster_benchmark.tools.benchmark.matrix import Matrix

SECONDS_BETWEEN_DRAWINGS = 2.0
SECONDS_BETWEEN_LINES = 30.0
GUESSED_OVERHEAD = 30.0  # seconds to start and evaluate a cell, before any has been measured
HEAD = ("cell", "state", "steps", "FPS", "reward", "training levels", "unseen levels", "all levels", "time")


class CellTable:
    """A table of all cells, redrawn in place on a terminal; a line now and then elsewhere."""

    def __init__(self, cells: Sequence[CellProgress], matrix: Matrix) -> None:
        self.cells, self.matrix = cells, matrix
        self._is_live = sys.stdout is not None and sys.stdout.isatty()
        self._height = 0
        self._last = 0.0
        self._said: dict[str, str] = {}
        self._started: float | None = None  # of the current cell

    def begin(self) -> None:
        self._started = time.monotonic()
        self.show(now=True)

    def show(self, now: bool = False) -> None:
        """Draw, if it is time to."""
        wait = SECONDS_BETWEEN_DRAWINGS if self._is_live else SECONDS_BETWEEN_LINES
        if not now and time.monotonic() - self._last < wait:
            return
        self._last = time.monotonic()
        for progress in self.cells:
            if progress.state == "training":
                with contextlib.suppress(UnusableRunError):  # it has not begun yet
                    progress.run = load_run(progress.directory)
        with contextlib.suppress(OSError, ValueError):  # the reader of our output is gone; the benchmark goes on
            self._draw() if self._is_live else self._say()

    def end(self) -> None:
        self.show(now=True)
        self._height = 0

    def lines(self) -> list[str]:
        return [*text.table(HEAD, [_row(progress) for progress in self.cells]), "", self.status()]

    def status(self) -> str:
        states = [progress.state for progress in self.cells]
        parts = [f"{states.count('done')} of {len(states)} cells done"]
        if "failed" in states:
            parts.append(f"{states.count('failed')} failed")
        left = self.seconds_left()
        if left:
            end = datetime.datetime.now() + datetime.timedelta(seconds=left)
            parts.append(f"about {text.duration(left)} left, until {end:%H:%M}")
        return ", ".join(parts)

    def seconds_left(self) -> float | None:
        """Estimate the time left from cells of the same variant, else from any; None if nothing is known."""
        left = 0.0
        for progress in self.cells:
            if progress.state in ("done", "failed"):
                continue
            whole = self._expected(progress)
            if whole is None:
                return None
            spent = 0.0
            if progress.state != "to come" and self._started is not None:
                spent = time.monotonic() - self._started
            left += max(1.0, whole - spent)
        return left

    def _expected(self, progress: CellProgress) -> float | None:
        done = [p for p in self.cells if p.state == "done" and p.seconds is not None]
        total = self.matrix.total_timesteps
        if self.matrix.duration_hours is not None and not (total and done):  # with both, steps may end a cell first
            training = self.matrix.duration_hours * 3600
            spare = [max(0.0, (p.seconds or 0.0) - training) for p in done]
            return training + (sum(spare) / len(spare) if any(spare) else GUESSED_OVERHEAD)
        alike = [p.seconds or 0.0 for p in done if p.cell.variant == progress.cell.variant]
        known = alike or [p.seconds or 0.0 for p in done]
        if known:
            return sum(known) / len(known)
        running = next((p for p in self.cells if p.state == "training" and p.run), None)
        if running is not None and running.run is not None and total and running.run.summary.avg_fps > 0:
            return total / running.run.summary.avg_fps + GUESSED_OVERHEAD
        return None

    def _draw(self) -> None:
        room = shutil.get_terminal_size()
        lines = [line[: room.columns - 1] for line in self.lines()]
        if len(lines) > room.lines - 1:  # the head, the cells around the current one, the last line
            current = next((i for i, p in enumerate(self.cells) if p.state not in ("done", "failed")), 0)
            shown = max(1, room.lines - 6)
            first = min(max(0, current - shown // 2), len(self.cells) - shown)
            lines = [*lines[:2], *lines[2 + first : 2 + first + shown], *lines[-2:]]
        up = f"\x1b[{self._height}A\x1b[J" if self._height else ""
        sys.stdout.write(up + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self._height = len(lines)

    def _say(self) -> None:
        for progress in self.cells:
            name, is_moving = progress.cell.name, progress.state in ("training", "evaluating")
            if is_moving or self._said.get(name, "to come") != progress.state:
                self._said[name] = progress.state
                cells = [cell for cell in _row(progress)[2:] if cell != text.NOTHING]
                why = f": {progress.reason}" if progress.reason else ""
                facts = ", ".join(f"{n} {c}" for n, c in zip(HEAD[2:], _row(progress)[2:], strict=True) if c in cells)
                print(f"{name}: {progress.state}{why}{f' ({facts})' if facts else ''} | {self.status()}", flush=True)


def _row(progress: CellProgress) -> list[str]:
    run = progress.run
    state = progress.state if progress.reason is None else f"{progress.state}: {progress.reason}"
    if run is None or progress.state == "to come":
        return [progress.cell.name, state, *[text.NOTHING] * 7]
    rewards = [e.mean_reward if (e := run.evaluations.get(levels)) else None for levels in ("train", "test", "all")]
    return [
        progress.cell.name,
        state,
        text.whole(run.summary.total_timesteps),
        text.whole(run.summary.avg_fps),
        text.decimal(run.summary.final_reward),
        *map(text.decimal, rewards),
        text.duration(run.summary.duration_hours * 3600),
    ]
