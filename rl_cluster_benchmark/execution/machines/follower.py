"""What every machine but the head asks itself while its workers train."""

from __future__ import annotations

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.execution.messages import INTERRUPTED
from rl_cluster_benchmark.run.memory import MemoryReadings


class Follower:
    """Gives the order for the workers of such a machine, and tells the head now and then how much memory they use."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._memory = cluster, MemoryReadings()

    def __call__(self) -> int:
        if self._memory.is_due():
            self._cluster.membership.memory = sum(self._memory.read().values())
        return INTERRUPTED if self._cluster.signals.received is not None else 0
