"""Which execution a run with worker processes has: `train` on the head or on a machine alone, `follow` elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.actor_learner import actor_learner
from rl_cluster_benchmark.execution.hogwild import hogwild
from rl_cluster_benchmark.execution.in_step import data_parallel
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.run.run import Run


class Execution(Protocol):
    def train(self, run: Run, cluster: Cluster | MachineAlone) -> None: ...

    def follow(
        self, cluster: Cluster, config: Config, plan: Plan, checkpoint: Path | None, progress: dict[str, Any]
    ) -> None: ...


EXECUTIONS: dict[str, Execution] = {
    "ppo": data_parallel, "a2c": data_parallel, "a3c": hogwild, "impala": actor_learner
}  # fmt: skip


def of(config: Config) -> Execution:
    return EXECUTIONS[config.algorithm]
