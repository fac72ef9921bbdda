"""The progress display of a run: a bar on a terminal, elsewhere a plain line at most every ten seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Status:
    fraction: float  # of the run that is done, 0 to 1
    elapsed: float  # seconds
    seconds_left: float | None
    step: int
    update: int
    fps: float
    loss: float
    entropy: float
    mean_reward: float | None
    mean_length: float | None

    def line(self) -> str:
        reward = "-" if self.mean_reward is None else f"{self.mean_reward:.2f}"
        length = "-" if self.mean_length is None else f"{self.mean_length:.0f}"
        return (
            f"Step: {self.step:,} | Update: {self.update:,} | FPS: {self.fps:,.0f} | Mean Reward: {reward} | "
            f"Mean Length: {length} | Loss: {self.loss:.4f} | Entropy: {self.entropy:.3f} | "
            f"{self.fraction:.0%} done, {_clock(self.elapsed)} so far, {_clock(self.seconds_left)} left"
        )


class Progress:
    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._last_line = 0.0
        self._last_status: Status | None = None
        lines = os.environ.get("RLCB_PROGRESS") == "lines"  # set by launchers that merge the outputs of several runs
        if sys.stderr is not None and sys.stderr.isatty() and not lines:
            self._bar = tqdm(total=1000, bar_format="{desc}{percentage:3.0f}%|{bar}|{postfix}", dynamic_ncols=True)
            self._bar.set_description("Training")

    def show(self, status: Status) -> None:
        if self._bar is not None:
            reward = "-" if status.mean_reward is None else f"{status.mean_reward:.2f}"
            self._bar.n = round(min(1.0, status.fraction) * 1000)
            self._bar.set_postfix_str(
                f"{status.step:,} steps, {status.fps:,.0f} FPS, reward {reward}, loss {status.loss:.3f}, "
                f"{_clock(status.seconds_left)} left"
            )
            return
        self._last_status = status
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._last_status is not None:
            self._print()

    def _print(self) -> None:
        assert self._last_status is not None
        with contextlib.suppress(OSError, ValueError):  # nobody reads the output any more; the run goes on
            print(self._last_status.line(), flush=True)
        self._last_line, self._last_status = time.monotonic(), None


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
