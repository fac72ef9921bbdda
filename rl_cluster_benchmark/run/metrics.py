"""The metrics of a run: a line of JSON and TensorBoard points per log interval, and statistics over the whole run."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rl_cluster_benchmark.core.atomic_files import cannot_write, write_atomically, write_json
from rl_cluster_benchmark.core.errors import UserError

MAX_LINE = 65_536
WINDOW = 100  # episodes that means are over: the first ones, the last ones, the best ones
KEYS = ("step", "time", "update")  # in every line; all other keys are scalars named as in CleanRL


class MetricsWriter:
    """Appends lines to metrics.jsonl and, if asked to, points to TensorBoard's files beside it."""

    def __init__(self, path: Path, *, tensorboard: bool, resumed_at: int | None) -> None:
        self.path = path
        self._tensorboard: Any = None
        try:
            self._file = path.open("a", encoding="utf-8")
            if tensorboard:
                # Let TensorBoard drop what the interrupted run wrote after the checkpoint that this one resumes from.
                purge = resumed_at + 1 if resumed_at is not None else None
                self._tensorboard = summary_writer()(str(path.parent), purge_step=purge)
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, line: dict[str, float]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                for name, value in line.items():
                    if name not in KEYS:
                        self._tensorboard.add_scalar(name, value, global_step=line["step"])
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def flush(self) -> None:
        """Flush the log to the disk; called before a checkpoint is written, which must not be newer than the log."""
        try:
            os.fsync(self._file.fileno())
            if self._tensorboard is not None:
                self._tensorboard.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the files, ignoring errors: every line was flushed when it was written, and an error raised then."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            if self._tensorboard is not None:
                self._tensorboard.close()


def summary_writer() -> Any:
    """Import and return TensorBoard's writer class; not at the top of the file, because it takes a second."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "tensorboard is not installed: pip install tensorboard, or --set logging.tensorboard=false."
        ) from None
    threading.excepthook = _but_for_tensorboard
    return SummaryWriter


def _but_for_tensorboard(args: threading.ExceptHookArgs) -> None:
    """Silence write errors in TensorBoard's thread, a hook for threading: the writer's next call raises them, too."""
    if type(args.thread).__name__ != "_AsyncWriterThread" or not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


def read_lines(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl, without invalid ones, such as a line that a crash cut short."""
    lines = []
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE):
                parsed = _parse(line)
                if parsed is not None:
                    lines.append(parsed)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    return lines


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(parsed, dict) and all(type(parsed.get(key)) in (int, float) for key in KEYS)
    return parsed if is_line else None


def cut_after(path: Path, update: int) -> None:
    """Remove the lines after this update, because a resumed run makes those updates again."""
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["update"] <= update]
        write_atomically(path, "".join(kept).encode())


def write_columns(path: Path, lines: Iterable[dict[str, float]]) -> None:
    """Write metrics.json: one list per metric, all of the same length."""
    rows = list(lines)
    names = list(dict.fromkeys(name for row in rows for name in row))
    write_json(path, {name: [row.get(name) for row in rows] for name in names})


class Asynchrony:
    """Sums up over a whole run how far apart those who act and those who learn were.

    Of each metric the mean over the updates; of one called `_max` the largest; of a count (system/) the last.
    A share of the time since the start (`_idle`) is also taken as it was last.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.waits: dict[str, list[float]] = {}  # role -> seconds waited and seconds lived, of all its processes

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            before = self._sums.get(name, 0.0)
            if name.endswith("_max"):
                self._sums[name], self._counts[name] = max(before, value), 1
            elif name.startswith("system/") or name.endswith("_idle"):
                self._sums[name], self._counts[name] = value, 1
            else:
                self._sums[name], self._counts[name] = before + value, self._counts.get(name, 0) + 1

    def summary(self) -> dict[str, float]:
        return {name.rpartition("/")[2]: total / self._counts[name] for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts), "waits": dict(self.waits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        self.waits = dict(state.get("waits", {}))


class EpisodeStatistics:
    """Rewards and lengths of a run's finished episodes."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0  # sum of the rewards of all episodes
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.last_lengths: deque[int] = deque(maxlen=WINDOW)
        self.best: float | None = None

    def add(self, episodes: Iterable[tuple[float, ...]]) -> None:
        """Add finished episodes in order, each a tuple that begins with (reward, length)."""
        for reward, length, *_ in episodes:
            self.count += 1
            self.total += reward
            self.last.append(reward)
            self.last_lengths.append(int(length))
            if len(self.first) < WINDOW:
                self.first.append(reward)
            if len(self.last) == WINDOW:
                mean = fmean(self.last)
                self.best = mean if self.best is None else max(self.best, mean)

    @property
    def mean_reward(self) -> float | None:
        return fmean(self.last) if self.last else None

    @property
    def mean_length(self) -> float | None:
        return fmean(self.last_lengths) if self.last_lengths else None

    def summary(self) -> dict[str, float | int | None]:
        """Return mean rewards over 100 episodes, or over all if there are fewer; None if no episode has ended."""
        return {
            "initial_reward": fmean(self.first) if self.first else None,
            "initial_reward_std": pstdev(self.first) if self.first else None,
            "final_reward": self.mean_reward,
            "final_reward_std": pstdev(self.last) if self.last else None,
            "best_reward": self.best if self.best is not None else self.mean_reward,
            "num_episodes": self.count,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "total": self.total,
            "first": list(self.first),
            "last": list(self.last),
            "last_lengths": list(self.last_lengths),
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.best, self.first = state["count"], state["best"], list(state["first"])
        self.total = state.get("total", 0.0)  # missing in older checkpoints
        self.last.extend(state["last"])
        self.last_lengths.extend(state["last_lengths"])
