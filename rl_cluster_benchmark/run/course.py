"""How far a run is to go, and when it saves: written once for everyone who has to know."""

from __future__ import annotations

import time

from rl_cluster_benchmark.config.schema import Config, TrainingConfig


class Goal:
    """The steps and the time that a run may take; it ends with whichever comes first."""

    def __init__(self, training: TrainingConfig) -> None:
        self._steps = training.total_timesteps
        self._seconds = training.duration_hours * 3600 if training.duration_hours is not None else None

    def fraction(self, steps: int, elapsed: float) -> float:
        """Return how much of the run is done after so many steps and seconds of training, at most 1."""
        by_time = elapsed / self._seconds if self._seconds else 0.0
        return min(1.0, max(steps / self._steps, by_time))

    def is_reached(self, steps: int) -> bool:
        """Return whether so many steps are all that were wanted."""
        return steps >= self._steps

    def time_is_up(self, elapsed: float) -> bool:
        """Return whether so many seconds of training are all that were allowed."""
        return self._seconds is not None and elapsed >= self._seconds


class SaveTimer:
    """Tells when a checkpoint is due: every so many updates, or when the last one is too many minutes old."""

    def __init__(self, config: Config) -> None:
        self._every, self._seconds = config.training.save_interval, config.logging.checkpoint_minutes * 60
        self.restart()

    def restart(self) -> None:
        """Count from now on: a checkpoint was made, or training begins."""
        self._saved_at = time.perf_counter()

    def is_due(self, updates: int) -> bool:
        """Return whether to save after so many updates."""
        return updates % self._every == 0 or time.perf_counter() - self._saved_at > self._seconds
