"""What one process of each machine does for its machine: talk to the other machines', over Gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.execution.task import deal
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.run import checkpoint

if TYPE_CHECKING:
    from rl_cluster_benchmark.cluster.rendezvous import Cluster
    from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone

EXACT_TAIL = 64  # values at the end of a compressed vector that stay float32: statistics, not gradients


@dataclass(frozen=True)
class MachineSeat:
    """Where a machine sits among the machines of the run; made by its parent process, handed to its workers."""

    node_rank: int
    num_nodes: int
    first_worker: int  # the rank of its first worker among all workers
    total_workers: int
    store: tuple[str, int]
    prefix: str
    interface: str
    timeout: float
    compression: str
    first_learner: int = 0  # of IMPALA: workers are its actors
    total_learners: int = 0

    @classmethod
    def of(cls, cluster: Cluster | MachineAlone, config: Config) -> MachineSeat:
        before = cluster.nodes[: cluster.rank]
        return cls(
            node_rank=cluster.rank,
            num_nodes=len(cluster.nodes),
            first_worker=sum(node.num_workers for node in before),
            total_workers=cluster.num_workers,
            store=cluster.address,
            prefix=cluster.prefix,
            interface=cluster.nodes[cluster.rank].interface,
            timeout=config.cluster.timeout,
            compression=config.cluster.compression,
            first_learner=sum(node.num_learners for node in before),
            total_learners=cluster.num_learners,
        )


@dataclass(frozen=True)
class MachineShare:
    """One machine's share of a run; made by its parent process, handed to its workers."""

    config: Config
    plan: Plan
    seat: MachineSeat
    folder: Path  # for files of its own
    resumed_path: Path | None  # the checkpoint to go on from
    progress: dict[str, Any]  # of the run by then

    def shards(self) -> list[list[int]]:
        """Return the environments of each of this machine's workers, of those that are dealt to all."""
        dealt = deal(self.config.env.num_envs, self.seat.total_workers)
        return dealt[self.seat.first_worker : self.seat.first_worker + self.plan.num_workers]

    def checkpoint(self) -> dict[str, Any] | None:
        return checkpoint.load(self.resumed_path) if self.resumed_path else None


class MachineLinks:
    """Sums and gathers over machines. Every call ends within the seat's timeout: with a result, or with an error."""

    def __init__(self, seat: MachineSeat, name: str = "leaders") -> None:
        """Join those of the same name, one on each machine: they talk to each other."""
        import torch.distributed as dist

        self.seat, self._dist = seat, dist
        os.environ.setdefault("GLOO_SOCKET_IFNAME", seat.interface)
        timeout = timedelta(seconds=seat.timeout)
        with told_as_loss(seat):
            store = dist.TCPStore(*seat.store, is_master=False, wait_for_workers=False, timeout=timeout)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{seat.prefix}/{name}", store),
                rank=seat.node_rank,
                world_size=seat.num_nodes,
                timeout=timeout,
            )

    def sum(self, tensor: Tensor) -> None:
        """Sum the tensor over all machines, in place; the result is the same on all, bit for bit."""
        with told_as_loss(self.seat):
            if self.seat.compression == "bfloat16" and tensor.dtype == torch.float32 and len(tensor) > EXACT_TAIL:
                self._sum_compressed(tensor)
            else:
                self._dist.all_reduce(tensor)

    def average(self, tensor: Tensor) -> None:
        with told_as_loss(self.seat):
            self._dist.all_reduce(tensor.div_(self.seat.num_nodes))

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return the rows [n, width] of all machines, one after the other; None but on the head. Their n may differ."""
        counts = torch.zeros(self.seat.num_nodes, dtype=torch.int64)
        counts[self.seat.node_rank] = len(rows)
        self.sum(counts)
        longest = int(counts.max())
        if longest == 0:
            return rows if self.seat.node_rank == 0 else None
        padded = torch.zeros(longest, rows.shape[1], dtype=rows.dtype)
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts] if self.seat.node_rank == 0 else None
        with told_as_loss(self.seat):
            self._dist.gather(padded, parts, dst=0)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]) if parts else None

    def start_sum(self, tensor: Tensor) -> Any:
        """Begin a sum, and return it as work in progress: done when `is_completed()`; `wait()` raises if it failed."""
        with told_as_loss(self.seat):
            return self._dist.all_reduce(tensor, async_op=True)

    def start_gather(self, row: Tensor) -> tuple[Any, list[Tensor]]:
        """Begin to gather rows of one size: return the work in progress, and where the head will find all of them."""
        parts = [torch.empty_like(row) for _ in range(self.seat.num_nodes)] if self.seat.node_rank == 0 else None
        with told_as_loss(self.seat):
            return self._dist.gather(row, parts, dst=0, async_op=True), parts or []

    def _sum_compressed(self, tensor: Tensor) -> None:
        gradient, tail = tensor[:-EXACT_TAIL], tensor[-EXACT_TAIL:]
        half = gradient.bfloat16()
        works: list[Any] = [self._dist.all_reduce(part, async_op=True) for part in (half, tail)]  # in flight together
        for work in works:
            work.wait()
        gradient.copy_(half)


def join_machines(seat: MachineSeat, rank: int) -> tuple[MachineLinks | None, Callable[[Tensor], None] | None]:
    """Return the way to other machines, if it is this worker's, and what its reducer does beyond its own machine."""
    if seat.num_nodes == 1:
        return None, None
    leaders = MachineLinks(seat) if rank == 0 else None
    return leaders, leaders.sum if leaders is not None else the_leader_does


def the_leader_does(total: Tensor) -> None:
    raise AssertionError("only the first worker of a machine talks to the others")


class LostContactError(TrainingFailedError):
    """Another machine, or the way to it, is gone."""


@contextlib.contextmanager
def told_as_loss(seat: MachineSeat) -> Iterator[None]:
    """Raise LostContactError for the RuntimeError in which Gloo reports a lost peer in its own words."""
    try:
        yield
    except RuntimeError as error:
        detail = str(error).strip().splitlines()[0].rpartition("] ")[2]
        raise LostContactError(
            f"The connection between the machines broke, or was silent for {seat.timeout:g} s (cluster.timeout), "
            f"during a reduction: {detail[:160]}"
        ) from None
