"""Statistics over seeds and games, as in "Deep RL at the edge of the statistical precipice" (Agarwal and others, 2021).

Scores come as one array per game, each over seeds. Bootstraps are stratified: every game's seeds are drawn from that
game's own. scipy does the resampling; tests compare the results with those of rliable, the authors' library.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scores = Sequence[Array]
"""[game][seed]; games may have different numbers of seeds."""

RESAMPLES = 10_000
ONE_SEED = "one seed: no interval"


class Estimate(NamedTuple):
    """A figure and its 95% interval; None where one seed gives no interval."""

    value: float
    interval: tuple[float, float] | None

    def overlaps(self, other: Estimate) -> bool | None:
        """Return whether the intervals overlap; None where one of them is missing."""
        if self.interval is None or other.interval is None:
            return None
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean over seeds with Student's t interval, which holds for the two to five seeds that people have."""
    from scipy import stats

    array = np.asarray(values, dtype=np.float64)
    middle = float(array.mean())
    if len(array) < 2:
        return Estimate(middle, None)
    half = float(stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array)))
    return Estimate(middle, (middle - half, middle + half))


def stratified_mean(scores: Scores) -> Estimate:
    """Return the mean over games of each game's mean."""

    def statistic(*samples: Array, axis: int) -> Array:
        return np.asarray(np.mean([sample.mean(axis=-1) for sample in samples], axis=0))

    return Estimate(statistic(*scores, axis=-1).item(), _interval(scores, statistic))


def interquartile_mean(scores: Scores) -> Estimate:
    """Return the mean of the middle half of all runs' scores, whatever game they are of."""
    return Estimate(_iqm(*scores, axis=-1).item(), _interval(scores, _iqm))


def probability_of_improvement(x: Scores, y: Scores) -> Estimate:
    """Return how likely a run of X is to score higher than one of Y on the same game; a tie counts half."""

    def statistic(*samples: Array, axis: int) -> Array:
        return _improvement(samples[: len(x)], samples[len(x) :])

    return Estimate(_improvement(x, y).item(), _interval([*x, *y], statistic))


def performance_profile(scores: Scores, thresholds: Array) -> tuple[Array, Array | None]:
    """Return the share of runs above each score [T], and its 95% band [2, T]; no band for one seed."""

    def share_above(threshold: float) -> Callable[..., Array]:
        return lambda *samples, axis: np.asarray(_joined(samples) > threshold).mean(axis=-1)

    shares = np.array([share_above(t)(*scores, axis=-1) for t in thresholds])
    bands = [_interval(scores, share_above(t), resamples=2000) for t in thresholds]
    known = [band for band in bands if band is not None]
    return shares, np.array(known).T if len(known) == len(bands) else None


def _iqm(*samples: Array, axis: int) -> Array:
    from scipy import stats

    return np.asarray(stats.trim_mean(_joined(samples), 0.25, axis=-1))


def _improvement(x: Scores, y: Scores) -> Array:
    games = []
    for mine, theirs in zip(x, y, strict=True):
        difference = mine[..., :, None] - theirs[..., None, :]
        games.append(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-2, -1)))
    return np.asarray(np.mean(games, axis=0))


def _joined(samples: Sequence[Array]) -> Array:
    """Return all games' runs in one row, behind whatever axis holds the resamples."""
    shape = np.broadcast_shapes(*(sample.shape[:-1] for sample in samples))
    return np.concatenate([np.broadcast_to(s, (*shape, s.shape[-1])) for s in samples], axis=-1)


def _interval(
    scores: Scores, statistic: Callable[..., Array], resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the 95% interval by a stratified bootstrap's percentiles; None where a game has one seed only."""
    from scipy import stats

    if any(len(game) < 2 for game in scores):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all values equal: the interval is a point, and that is right
        result = stats.bootstrap(
            tuple(scores),
            statistic,
            n_resamples=resamples,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    low, high = result.confidence_interval
    return float(low), float(high)
