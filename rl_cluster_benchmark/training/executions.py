"""Which execution a run with worker processes has: `train` on the head or on a machine alone, `follow` elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.actor_learner import actor_learner_cluster
from rl_cluster_benchmark.execution.hogwild import hogwild_cluster
from rl_cluster_benchmark.execution.in_step import data_parallel
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.run.run import Run


class Execution(Protocol):
    """Runs the training on several machines: `train` on the head, `follow` on every other machine."""

    def train(self, run: Run, cluster: Cluster) -> None: ...

    def follow(
        self, cluster: Cluster, config: Config, plan: Plan, checkpoint: Path | None, progress: dict[str, Any]
    ) -> None: ...


def of(config: Config) -> Execution:
    """Return the execution of the config's algorithm."""
    if config.traits.has_actors:
        return actor_learner_cluster
    return hogwild_cluster if config.traits.is_lock_free else data_parallel
