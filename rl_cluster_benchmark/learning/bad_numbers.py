"""NaN and infinite numbers: where they are looked for, what they do to an update, how they are counted.

Losses and gradients are checked after they were summed over the workers; experience is checked before it is learned
from, and the counts are summed. So all workers see the same numbers and decide the same. An update that is left out
changes nothing but the counts: neither the parameters nor the statistics of the optimiser and of the rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.learner import is_finite

OnNan = Literal["stop", "skip"]
SKIPPED, REWARDS, OBSERVATIONS = "skipped_updates", "bad_rewards", "bad_observations"
COUNTS = (SKIPPED, REWARDS, OBSERVATIONS)  # reported beside an update's losses; added up, not averaged


def report(losses: dict[str, float], on_nan: OnNan) -> dict[str, float]:
    """Return the losses of an optimiser step with the count SKIPPED: 0, or 1 if they are not finite.

    Such a step was left out, and its losses become NaN. With `on_nan` = stop, raise TrainingFailedError instead.
    """
    if is_finite(*losses.values()):
        return losses | {SKIPPED: 0.0}
    if on_nan == "stop":
        raise TrainingFailedError(
            "The loss or its gradient became NaN or infinite; the last good checkpoint is kept. A smaller "
            "training.learning_rate, or hardware.precision=float32, may help; training.on_nan=skip leaves such updates "
            "out."
        )
    return dict.fromkeys(losses, math.nan) | {SKIPPED: 1.0}


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean losses over the steps that were taken, NaN if none was, and the sums of the counts."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _together(name, [step[name] for step in steps if name in step]) for name in names}


def _together(name: str, values: Sequence[float]) -> float:
    if name in COUNTS:
        return float(sum(values))
    taken = [value for value in values if math.isfinite(value)]
    return float(sum(taken) / len(taken)) if taken else math.nan


def count(rollout: Rollout | None) -> list[float]:
    """Return 1 if the rollout is to be left out, else 0, the number of bad rewards and that of bad observations.

    Observations are checked only if they are floats: bytes cannot be NaN or infinite.
    """
    if rollout is None:
        return [0.0, 0.0, 0.0]
    rewards = float((~rollout.rewards.isfinite()).sum())
    observations, last = 0.0, False
    if rollout.observations.is_floating_point():
        observations = float((~rollout.observations.isfinite()).flatten(2).any(-1).sum())
        last = not bool(rollout.last_observations.isfinite().all())  # counted with the next rollout, which starts there
    return [float(rewards > 0 or observations > 0 or last), rewards, observations]


def left_out(counts: Sequence[float], on_nan: OnNan) -> dict[str, float]:
    """Return the counts of an update that is left out because of bad experience: `counts` of rewards and observations.

    With `on_nan` = stop, raise TrainingFailedError instead.
    """
    rewards, observations = counts
    if on_nan == "stop":
        raise TrainingFailedError(
            f"The environment gave {rewards:.0f} rewards and {observations:.0f} observations that are NaN or infinite; "
            "the last good checkpoint is kept. training.on_nan=skip leaves such experience out."
        )
    return {SKIPPED: 1.0, REWARDS: rewards, OBSERVATIONS: observations}
