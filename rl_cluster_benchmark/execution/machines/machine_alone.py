"""The cluster that a machine is when it trains alone."""

from __future__ import annotations

from dataclasses import dataclass

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine.planning import Plan


class MachineAlone:
    """A cluster of one machine: it has no store, opens no socket, and has nobody to listen to."""

    rank, is_head = 0, True
    address, prefix = ("", 0), ""

    def __init__(self, plan: Plan, signals: Signals) -> None:
        self.num_workers, self.num_learners, self.signals = plan.num_workers, plan.num_learners, signals
        self.nodes = [_Itself(plan.num_workers, plan.num_learners)]
        self.membership = _NobodyElse()

    def take_signal(self, rank: int, number: int) -> None:
        """Do nothing: the signal was received here."""


@dataclass(frozen=True)
class _Itself:
    """What a node of a cluster says of itself (cluster/rendezvous.py), as far as executions ask for it."""

    num_workers: int
    num_learners: int
    interface: str = ""


class _NobodyElse:
    """The other machines of a machine alone (cluster/membership.py): none of them can fail."""

    memory = 0

    def check(self) -> None:
        """Find nothing wrong."""

    def explain(self, error: TrainingFailedError) -> TrainingFailedError:
        """Return the error: nobody else can have caused it."""
        return error
