"""Which execution a run with worker processes has, and how it goes on the head and on all other machines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.actor_learner.actor_learner import ActorLearnerMachine
from rl_cluster_benchmark.execution.hogwild.hogwild import HogwildMachine
from rl_cluster_benchmark.execution.in_step.data_parallel import DataParallelMachine
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_links import MachineSeat, MachineShare
from rl_cluster_benchmark.execution.messages import INTERRUPTED, Report, Reports, Updates, order_of
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.run.memory import MemoryReadings
from rl_cluster_benchmark.run.run import Run


class MachinePart(Protocol):
    """One machine's part of a run: its processes, and the memory that they share.

    It is made of the cluster and of the machine's share of the run.
    """

    def train(self, *, look: Callable[[], int], start: Callable[[], None], hear: Callable[[int, Report], None]) -> None:
        """Run the processes to their end.

        `look` gives the order for them as this machine sees it, `start` is called when time begins to count, and on the
        head `hear` gets what the processes of all machines report, with the number of the machine.
        """
        ...

    def updates(self, run: Run) -> Updates:
        """Return how reports become updates of the run, on the head."""
        ...


def _part_of(config: Config) -> Callable[..., MachinePart]:
    """Return what makes a machine's part of a run of the config's algorithm."""
    if config.traits.has_actors:
        return ActorLearnerMachine
    return HogwildMachine if config.traits.is_lock_free else DataParallelMachine


def train(run: Run, cluster: Cluster | MachineAlone) -> None:
    """On the head of a cluster, or on a machine alone: train, and write down what all machines report."""
    seat, folder = MachineSeat.of(cluster, run.config), run.directory.root
    share = MachineShare(run.config, run.plan, seat, folder, run.resumed_path, run.progress_state())
    here = _part_of(run.config)(cluster, share)
    updates = here.updates(run)
    try:
        here.train(look=lambda: order_of(run), start=run.start, hear=Reports(run, updates).hear)
    finally:  # also of a run that fails every step counts
        updates.complete()


def follow(cluster: Cluster, config: Config, plan: Plan, resumed_path: Path | None, progress: dict[str, Any]) -> None:
    """On every other machine of a cluster: train. Files, if there are any, are its own and lie on its own disk."""
    folder = Path(tempfile.gettempdir())
    share = MachineShare(config, plan, MachineSeat.of(cluster, config), folder, resumed_path, progress)
    here = _part_of(config)(cluster, share)
    memory = MemoryReadings()

    def look() -> int:
        """Tell the head now and then how much memory the workers use, and give the order that this machine sees."""
        if memory.is_due():
            cluster.membership.memory = sum(memory.read().values())
        return INTERRUPTED if cluster.signals.received is not None else 0

    here.train(look=look, start=lambda: None, hear=lambda node, report: None)
