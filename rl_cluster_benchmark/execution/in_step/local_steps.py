"""Machines that step by themselves and average their parameters every few updates (cluster.sync=local_sgd)."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_cluster_benchmark.execution.loop import Worker
from rl_cluster_benchmark.execution.machines.machine_links import MachineLinks, the_leader_does
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.learning.losses import COUNTS, REWARDS
from rl_cluster_benchmark.learning.reduction import Reducer


class WithinMachine(Reducer):
    """The sum over the workers of this machine only."""

    def __init__(self, everywhere: SharedMemoryReducer) -> None:
        self._everywhere = everywhere

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.total(tensor))

    running_sum = __call__

    def total(self, vector: Tensor) -> Tensor:
        return self._everywhere.sum(vector)

    def vector(self, size: int) -> Tensor:
        return self._everywhere.vector(size)


class LocalSteps:
    """A worker's part in the averages. Only its machine's first worker has `links` to the other machines."""

    def __init__(
        self, worker: Worker, reduce: SharedMemoryReducer, links: MachineLinks | None, *, every: int,
        total_workers: int, updates: int,
    ) -> None:  # fmt: skip
        """`reduce` sums over all machines; `updates` is the number of those made before this run was resumed."""
        self._worker, self._reduce, self._links = worker, reduce, links
        self._every, self._total_workers, self._averaged_at = every, total_workers, updates

    def is_averaged(self, updates: int) -> bool:
        """Return whether all machines have the same parameters after so many updates."""
        return self._averaged_at == updates

    def update_done(self, updates: int) -> None:
        """Average if that is due after so many updates."""
        if updates % self._every == 0:
            self.average(updates)

    def average(self, updates: int) -> None:
        """Give all machines the mean of their parameters and optimiser states."""
        links, algorithm = self._links, self._worker.algorithm
        for vector in algorithm.learner.vectors():
            self._reduce.share(vector, links.average if links else the_leader_does)
        self._worker.model.weights_changed()
        scale = algorithm.normalize_rewards.scale
        mine = torch.tensor([scale.mean, scale.variance, scale.count], dtype=torch.float64)
        scale.mean, scale.variance, scale.count = (self._reduce(mine) / self._total_workers).tolist()
        self._averaged_at = updates

    def of_all_machines(self, losses: dict[str, float]) -> dict[str, float]:
        """Return the means over the machines that learned something; NaN if none did. Counts are added up."""
        if REWARDS in losses:  # bad experience, which all machines leave out and have counted together
            return losses
        workers_here = self._reduce.num_workers
        shares = [value / workers_here if name in COUNTS else value for name, value in losses.items()]
        mine = torch.tensor(shares, dtype=torch.float64)
        is_known = mine.isfinite().double()
        total, known = self._reduce(torch.cat([mine.nan_to_num(0.0, 0.0, 0.0), is_known])).chunk(2)
        sums, means = total.tolist(), (total / known).tolist()
        return {
            name: float(round(sums[place])) if name in COUNTS else means[place] for place, name in enumerate(losses)
        }
