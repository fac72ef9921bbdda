"""One curve per group: the mean over its seeds on a common axis, with the range from the lowest to the highest seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis.groups import Group
from rl_cluster_benchmark.tools.analysis.runs import RunRecord

Axis = Literal["step", "time"]
Array = NDArray[np.float64]

POINTS = 200
REWARD = "charts/episodic_return"


@dataclass(frozen=True)
class Curve:
    """A metric over steps or time: the mean over seeds, the lowest and the highest."""

    x: Array
    mean: Array
    low: Array
    high: Array
    early: NDArray[np.bool_]  # rewards before 100 episodes have ended: of short episodes only

    def __len__(self) -> int:
        return len(self.x)


def curve(group: Group, metric: str, axis: Axis) -> Curve:
    """Return the group's curve as far as every seed goes; an empty one where a seed does not have the metric."""
    seeds = [_points(run, metric, axis) for run in group.runs]
    if any(len(x) == 0 for x, _, _ in seeds):
        nothing = np.zeros(0)
        return Curve(nothing, nothing, nothing, nothing, nothing.astype(bool))
    if len(seeds) == 1 and len(seeds[0][0]) <= POINTS:
        x, y, early = seeds[0]
        return Curve(x, y, y, y, early)
    first, last = max(x[0] for x, _, _ in seeds), min(x[-1] for x, _, _ in seeds)
    grid = np.linspace(first, max(first, last), min(POINTS, max(len(x) for x, _, _ in seeds)))
    values = np.array([np.interp(grid, x, y) for x, y, _ in seeds])
    early = np.any([np.interp(grid, x, e) > 0 for x, _, e in seeds], axis=0)
    return Curve(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0), early)


def _points(run: RunRecord, metric: str, axis: Axis) -> tuple[Array, Array, NDArray[np.bool_]]:
    series = run.series
    if metric not in series:
        return np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool)
    known = np.isfinite(series[metric])
    early = np.zeros(known.sum(), dtype=bool)
    if metric == REWARD and "charts/episodes" in series:
        early = series["charts/episodes"][known] < WINDOW
    return series[axis][known], series[metric][known], early
