"""What the first worker of each machine does for its machine: talk to the others', over Gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.errors import TrainingFailedError

EXACT_TAIL = 64  # values at the end of a compressed vector that stay float32: statistics, not gradients


@dataclass(frozen=True)
class Seat:
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


class Leaders:
    """Sums and gathers over machines. Every call ends within the seat's timeout: with a result, or with an error."""

    def __init__(self, seat: Seat) -> None:
        import torch.distributed as dist

        self.seat, self._dist = seat, dist
        os.environ.setdefault("GLOO_SOCKET_IFNAME", seat.interface)
        timeout = timedelta(seconds=seat.timeout)
        with _told_as_loss(seat):
            store = dist.TCPStore(*seat.store, is_master=False, wait_for_workers=False, timeout=timeout)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{seat.prefix}/leaders", store),
                rank=seat.node_rank,
                world_size=seat.num_nodes,
                timeout=timeout,
            )

    def sum(self, tensor: Tensor) -> None:
        """In place, over all machines; the result is the same on all, bit for bit."""
        with _told_as_loss(self.seat):
            if self.seat.compression == "bfloat16" and tensor.dtype == torch.float32 and len(tensor) > EXACT_TAIL:
                self._sum_compressed(tensor)
            else:
                self._dist.all_reduce(tensor)

    def average(self, tensor: Tensor) -> None:
        with _told_as_loss(self.seat):
            self._dist.all_reduce(tensor.div_(self.seat.num_nodes))

    def gather(self, rows: Tensor) -> Tensor | None:
        """The rows [n, width] of all machines, one after the other, on the head only; n may differ."""
        counts = torch.zeros(self.seat.num_nodes, dtype=torch.int64)
        counts[self.seat.node_rank] = len(rows)
        self.sum(counts)
        longest = int(counts.max())
        if longest == 0:
            return rows if self.seat.node_rank == 0 else None
        padded = torch.zeros(longest, rows.shape[1])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts] if self.seat.node_rank == 0 else None
        with _told_as_loss(self.seat):
            self._dist.gather(padded, parts, dst=0)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]) if parts else None

    def _sum_compressed(self, tensor: Tensor) -> None:
        gradient, tail = tensor[:-EXACT_TAIL], tensor[-EXACT_TAIL:]
        half = gradient.bfloat16()
        works: list[Any] = [self._dist.all_reduce(part, async_op=True) for part in (half, tail)]  # in flight together
        for work in works:
            work.wait()
        gradient.copy_(half)


class LostContactError(TrainingFailedError):
    """Another machine, or the way to it, is gone."""


@contextlib.contextmanager
def _told_as_loss(seat: Seat) -> Iterator[None]:
    """Gloo reports a lost peer as a RuntimeError, in its own words."""
    try:
        yield
    except RuntimeError as error:
        detail = str(error).strip().splitlines()[0].rpartition("] ")[2]
        raise LostContactError(
            f"The connection between the machines broke, or was silent for {seat.timeout:g} s (cluster.timeout), "
            f"during a reduction: {detail[:160]}"
        ) from None
