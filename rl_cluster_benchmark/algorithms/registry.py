"""The algorithms that `--algorithm` can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_cluster_benchmark.algorithms.a2c import A2C
from rl_cluster_benchmark.algorithms.impala import Impala
from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.config.traits import TRAITS, Traits
from rl_cluster_benchmark.experience.returns import RewardNormalizer
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.learner import Learner
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


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


class StartsLearning(Protocol):
    """Builds an algorithm for a model and for the environments of this process."""

    def __call__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> LearningAlgorithm: ...  # fmt: skip


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its properties, and the class that learns."""

    traits: Traits
    learning: StartsLearning


# A3C is A2C, executed by workers that do not wait for each other; in one process it is A2C.
ALGORITHMS = {
    algorithm.traits.name: algorithm
    for algorithm in (
        Algorithm(TRAITS["ppo"], PPO),
        Algorithm(TRAITS["a2c"], A2C),
        Algorithm(TRAITS["a3c"], A2C),
        Algorithm(TRAITS["impala"], Impala),
    )
}
