"""How a trial is judged: the mean return over a stretch of a run's log, and successive halving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rl_cluster_benchmark.tools.analysis.series import GrowingLog
from rl_cluster_benchmark.tools.search.search_space import Rung


class Point(NamedTuple):
    """A line of a run's log: counts since the start of the run."""

    step: float
    episodes: float
    return_sum: float


class Log:
    """The returns in the log of a run that is going on."""

    def __init__(self, path: Path) -> None:
        self.points: list[Point] = []
        self._log = GrowingLog(path)

    def read(self) -> None:
        """Take in the lines that were written since the last call."""
        for line in self._log.new_lines():
            if "charts/return_sum" in line:  # it is left out when it is infinite
                self.points.append(Point(line["step"], line["charts/episodes"], line["charts/return_sum"]))

    def mean_return(self, last_steps: int, at: int | None = None) -> float | None:
        """Return the mean return of the episodes that ended in the last steps before `at`; by default, before the end.

        The log has a line for every update or so. The stretch therefore ends with the first line at or after `at`, and
        begins with the last line that is at least `last_steps` before that one. None: no episode ended there.
        """
        if not self.points or (at is not None and self.points[-1].step < at):
            return None
        end = self.points[-1] if at is None else next(point for point in self.points if point.step >= at)
        earlier = [point for point in self.points if point.step <= end.step - last_steps]
        start = earlier[-1] if earlier else Point(0, 0, 0)
        episodes = end.episodes - start.episodes
        return (end.return_sum - start.return_sum) / episodes if episodes else None


def is_stopped(rung: Rung, value: float, others: Sequence[float]) -> bool:
    """Return whether a trial ends at this rung, with what the trials that reached it before had there.

    It goes on while fewer than `rung.after` have been there, and if it is among the best: of n trials, this one
    included, the best (1 - stop) n, rounded up. Equal values all go on.
    """
    if len(others) < rung.after:
        return False
    kept = math.ceil((1 - rung.stop) * (len(others) + 1) - 1e-9)
    return sum(other > value for other in others) >= kept
