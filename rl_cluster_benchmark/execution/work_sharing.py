"""A part of every minibatch goes to whichever worker is free first, so that slow cores do not hold up fast ones.

Cores differ: two threads share one, neighbours take some of its cache, laptops mix fast and slow ones. The workers'
experience lies in shared memory, where any of them can read it. Each first computes on its own samples; the rest of the
minibatch is cut into pieces that the workers draw like tickets. Every piece has a gradient of its own, and all are
summed in a fixed order, so that the result does not depend on who computed what.
"""

from __future__ import annotations

import multiprocessing.reduction
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.on_policy import Batch
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.execution import hidden_gradient
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.execution.shared import SharedTensors
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.hardware import Plan
from rl_cluster_benchmark.rollout import Rollout

PIECES_PER_WORKER, FEWEST_PIECES = 3, 24
STEP_FIELDS = {
    "actions": torch.int64,
    "log_probs": torch.float32,
    "values": torch.float32,
    "rewards": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "valid": torch.bool,
}
TARGETS = ("weights", "advantages", "returns")  # that each worker finds for its own samples


def num_pieces(num_workers: int) -> int:
    """Into how many a minibatch's shared part is cut at most."""
    return min(256, max(FEWEST_PIECES, PIECES_PER_WORKER * num_workers + 2))  # a ticket is a byte


class Tickets:
    """Numbers that processes draw, each once: the bytes in a pipe."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def issue(self, count: int) -> None:
        os.write(self._in, bytes(range(count)))

    def draw(self) -> Iterator[int]:
        while True:
            try:
                (ticket,) = os.read(self._out, 1)
            except BlockingIOError:
                return
            yield ticket

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)

    def __getstate__(self) -> dict[str, Any]:
        return {"ends": [multiprocessing.reduction.DupFd(end) for end in (self._out, self._in)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._out, self._in = (end.detach() for end in state["ends"])


class SharedWork:
    """What the parent makes and hands to all workers: everyone's experience, and the tickets."""

    def __init__(self, task: Task, shards: Sequence[Sequence[int]], config: Config, plan: Plan) -> None:
        self.shards, self.fraction, self.tickets = shards, plan.balance, Tickets()
        n_steps = config.training.n_steps
        num_envs = sum(map(len, shards))
        steps = (n_steps, num_envs)
        self.experience = SharedTensors(
            {
                "observations": ((*steps, *task.observation_shape), task.observation_dtype),
                "last_observations": ((num_envs, *task.observation_shape), task.observation_dtype),
                "last_values": ((num_envs,), torch.float32),
                **{name: (steps, dtype) for name, dtype in STEP_FIELDS.items()},
                **dict.fromkeys(TARGETS, (steps, torch.float32)),
            }
        )
        self.hidden: SharedTensors | None = None
        if plan.engine == "native" and task.hidden_shape is not None:
            whole = n_steps * num_envs
            largest = min(config.batch_size, whole) if config.algorithm == "ppo" else whole
            self.hidden = hidden_gradient.allocate(task.hidden_shape, largest)


class WorkSharing:
    """One worker's end."""

    def __init__(self, work: SharedWork, rank: int, reduce: SharedMemoryReducer) -> None:
        self.rank, self.fraction = rank, work.fraction
        self.env_ids: Sequence[int] = [env_id for shard in work.shards for env_id in shard]
        self.owners: Sequence[int] = [worker for worker, shard in enumerate(work.shards) for _ in shard]
        self._experience, self._tickets, self._reduce = work.experience, work.tickets, reduce
        first = self.owners.index(rank)
        self._own = slice(first, first + len(work.shards[rank]))
        self.hidden: HiddenGradient | None = None
        if work.hidden is not None:
            self.hidden = reduce.hidden = HiddenGradient(work.hidden, rank, reduce.num_workers)

    def rollout(self) -> Rollout:
        """To be filled: this worker's part of everyone's experience."""
        steps = {name: self._experience[name][:, self._own] for name in ("observations", *STEP_FIELDS)}
        last = {name: self._experience[name][self._own] for name in ("last_observations", "last_values")}
        return Rollout(**steps, **last)  # type: ignore[arg-type]

    def batch(self, weights: Tensor, advantages: Tensor, returns: Tensor) -> Batch:
        """Everyone's samples. Those of the others may be read once they have all come to a reduction."""
        for name, own in zip(TARGETS, (weights, advantages, returns), strict=True):
            self._experience[name][:, self._own] = own
        names = ("observations", "weights", "actions", "log_probs", "values", "advantages", "returns")
        return Batch(*(self._experience[name].flatten(0, 1) for name in names))

    def vectors(self, size: int) -> list[Tensor]:
        """For the gradients of the pieces."""
        return self._reduce.spare_vectors(size)

    def offer(self, count: int) -> None:
        """Say that there are so many pieces. One worker does it; one that comes too early for it only helps less."""
        self._reduce.used_spares = count
        if self.rank == 0 and count:
            self._tickets.issue(count)

    def take(self) -> Iterator[int]:
        return self._tickets.draw()
