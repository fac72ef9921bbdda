"""Sums over the workers of one machine.

Every worker puts its vector where all can read it, sums its own slice of everyone's, and reads
the whole sum back. Each adds in the order of the ranks, so the result is the same on all and from run to run.
This relies on the order of stores: what a worker has written is seen by whoever sees it arrive (`meet`). x86 keeps it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.learning.reduction import Reducer
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors
from rl_cluster_benchmark.processes.waiting import wait_until

SMALL_SPARE = 64  # doubles besides the moments of an update's minibatches: counters, statistics
VECTOR_SPARE = 64  # floats behind the gradient, for the loss statistics


class SharedMemoryReducer(Reducer):
    """One worker's end of the sums: all workers ask for the same ones, in the same order."""

    @staticmethod
    def allocate(num_workers: int, vector_size: int, small_size: int, spares: int = 0) -> SharedTensors:
        """Make the memory for sums, once in the parent: floats for the gradient, and doubles for anything else.

        Spare vectors are added to the sum of the workers' own, as many as are in use.
        """
        return SharedTensors(
            {
                "arrivals": ((num_workers, CACHE_LINE), torch.int64),
                "vectors": ((num_workers + spares, vector_size), torch.float32),
                "vector_sum": ((vector_size,), torch.float32),
                "small": ((num_workers, small_size), torch.float64),
                "small_sum": ((small_size,), torch.float64),
            }
        )

    def __init__(
        self, memory: SharedTensors, rank: int, clock: PhaseClock, beyond: Callable[[Tensor], None] | None = None,
        hidden: HiddenGradient | None = None,
    ) -> None:  # fmt: skip
        """`beyond`, called by the first worker, adds what other machines have to this machine's sum.

        `hidden` makes a part of the gradient vector, which is not summed.
        """
        self.rank, self.clock, self.beyond, self.hidden = rank, clock, beyond, hidden
        self._memory = memory
        self._arrivals = memory["arrivals"][:, 0].numpy()
        self.num_workers = len(self._arrivals)
        self._meetings = 0
        self._used_spares = 0

    def spare_vectors(self, size: int) -> list[Tensor]:
        return list(self._memory["vectors"][self.num_workers :, :size])

    def use_spares(self, count: int) -> None:
        """Add so many of the spare vectors to the sums of vectors that follow."""
        self._used_spares = count

    def vector(self, size: int) -> Tensor:
        return self._memory["vectors"][self.rank, :size]

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.sum(tensor, self.beyond))

    running_sum = __call__

    def total(self, vector: Tensor) -> Tensor:
        return self.sum(vector, self.beyond)

    def sum(self, tensor: Tensor, beyond: Callable[[Tensor], None] | None = None) -> Tensor:
        """Return the sum, to be read before this reducer is used again: nobody writes to it before all have read it."""
        with self.clock.phase("communication"):
            kind = "vector" if tensor.dtype == torch.float32 and tensor.dim() == 1 else "small"
            parts, total = self._memory["vectors" if kind == "vector" else "small"], self._memory[f"{kind}_sum"]
            size = tensor.numel()
            mine = parts[self.rank, :size]
            if mine.data_ptr() != tensor.data_ptr():
                mine.copy_(tensor.reshape(-1))
            self.meet()
            count = self.num_workers + (self._used_spares if kind == "vector" else 0)
            made = self.hidden if kind == "vector" and self.hidden and self.hidden.is_due else None
            for first, last in [(0, made.part.start), (made.part.stop, size)] if made else [(0, size)]:
                start, end = (first + (last - first) * i // self.num_workers for i in (self.rank, self.rank + 1))
                torch.sum(parts[:count, start:end], dim=0, out=total[start:end])
            if made:
                with self.clock.phase("update"):
                    made.write(total)
            self.meet()
            if beyond is not None:
                if self.rank == 0:
                    beyond(total[:size])
                self.meet("communication")
            return total[:size].view(tensor.shape)

    def share(self, tensor: Tensor, change: Callable[[Tensor], None]) -> None:
        """Let the first worker change a float32 vector that all have, and give all the result."""
        with self.clock.phase("communication"):
            result = self._memory["vector_sum"][: tensor.numel()]
            self.meet()  # nobody reads the last sum any more
            if self.rank == 0:
                change(result.copy_(tensor))
            self.meet("communication")
            tensor.copy_(result)

    def meet(self, phase: str = "waiting") -> None:
        """Wait until all workers have come here.

        The time counts as this phase: while the first worker talks to other machines, all of them communicate.
        """
        self._meetings += 1
        self._arrivals[self.rank] = self._meetings
        wait_until(lambda: bool(self._arrivals.min() >= self._meetings), self.clock, phase)
