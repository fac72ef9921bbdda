"""The algorithms that `--algorithm` can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rl_cluster_benchmark.algorithms.a2c import A2C
from rl_cluster_benchmark.algorithms.impala import Impala
from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.experience.returns import RewardNormalizer
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.learner import Learner


class LearningAlgorithm(Protocol):
    """An algorithm with its model and optimiser: the interface that executions call."""

    learner: Learner  # the parameters and their optimiser
    normalize_rewards: RewardNormalizer

    def update(
        self, rollout: Rollout, *, index: int, progress: float, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        """Learn from a rollout; return the mean losses.

        It is update number `index` of the run, of which `progress` (0 to 1) is done. When `interrupted` returns true,
        the update ends after the current optimiser step.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


# A3C is A2C, executed by workers that do not wait for each other; in one process it is A2C.
ALGORITHMS: dict[str, type[PPO] | type[A2C] | type[Impala]] = {"ppo": PPO, "a2c": A2C, "a3c": A2C, "impala": Impala}
