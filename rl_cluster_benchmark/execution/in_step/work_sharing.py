"""A part of every minibatch goes to whichever worker is free first, so that slow cores do not hold up fast ones.

Cores differ: two threads share one, neighbours take some of its cache, laptops mix fast and slow ones. The workers'
experience lies in shared memory, where any of them can read it. Each first computes on its own samples; the rest of the
minibatch is cut into pieces that whoever is free takes. Every piece has a gradient of its own, and all are summed in a
fixed order, so that the result does not depend on who computed what.
Nothing is locked: a piece is one worker's alone, and what all have written they read after they have met (reduce.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution import hidden_gradient
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.execution.in_step.helping import Helping, SharedHelp
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.batch import Batch
from rl_cluster_benchmark.learning.learner import OPTIMIZERS
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.nets.models import ActorCritic
from rl_cluster_benchmark.processes.claims import MOST, Claims
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors

PIECES_PER_WORKER, FEWEST_PIECES = 6, 24
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
    """Return into how many pieces the shared part of a minibatch is cut at most."""
    return min(MOST, max(FEWEST_PIECES, PIECES_PER_WORKER * num_workers))


class SharedWork:
    """What the parent makes and hands to all workers: everyone's experience, and the pieces to take."""

    def __init__(self, task: Task, shards: Sequence[Sequence[int]], config: Config, plan: Plan) -> None:
        self.shards, self.fraction, self.pieces = shards, plan.balance, Claims()
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
        self.moments = OPTIMIZERS[config.training.optimizer].MOMENTS
        self.learned = SharedTensors(
            dict.fromkeys(("parameters", *self.moments), ((task.num_parameters,), torch.float32))
        )
        self.hidden: SharedTensors | None = None
        self.help: SharedHelp | None = None
        if plan.engine == "native" and task.hidden_shape is not None:
            self.help = SharedHelp(len(shards), num_envs, width=task.hidden_shape[0])
            whole = n_steps * num_envs
            largest = min(config.batch_size, whole) if config.traits.has_minibatches else whole
            self.hidden = hidden_gradient.allocate(task.hidden_shape, largest, plan.precision)

    def hidden_gradient(self, rank: int) -> HiddenGradient | None:
        """Return that worker's part in making the hidden layer's gradient, if it is made once for a minibatch."""
        return HiddenGradient(self.hidden, rank, len(self.shards)) if self.hidden is not None else None


class WorkSharing:
    """One worker's part in shared minibatches: what an algorithm asks of them (learning/reduction.py)."""

    def __init__(self, work: SharedWork, rank: int, reduce: SharedMemoryReducer) -> None:
        self.rank, self.fraction = rank, work.fraction
        self.env_ids: Sequence[int] = [env_id for shard in work.shards for env_id in shard]
        self.owners: Sequence[int] = [worker for worker, shard in enumerate(work.shards) for _ in shard]
        self._experience, self._pieces, self._reduce = work.experience, work.pieces, reduce
        *starts, _ = accumulate(map(len, work.shards), initial=0)
        self._columns = [slice(start, start + len(shard)) for start, shard in zip(starts, work.shards, strict=True)]
        self._own, self._help, self._learned = self._columns[rank], work.help, work.learned
        self._moments = work.moments
        self.meet = reduce.meet
        self.hidden = reduce.hidden

    def rollout(self) -> Rollout:
        """Return the rollout to be filled: this worker's part of everyone's experience."""
        steps = {name: self._experience[name][:, self._own] for name in ("observations", *STEP_FIELDS)}
        last = {name: self._experience[name][self._own] for name in ("last_observations", "last_values")}
        return Rollout(**steps, **last)  # type: ignore[arg-type]

    def helping(self, model: ActorCritic, clock: PhaseClock) -> Helping | None:
        if self._help is None or model.native_trunk is None:
            return None
        return Helping(self._help, self.rank, self._columns, self._experience["observations"], model, clock)

    def batch(self, weights: Tensor, advantages: Tensor, returns: Tensor) -> Batch:
        """Return everyone's samples. Those of others may be read once all have come to a reduction."""
        for name, own in zip(TARGETS, (weights, advantages, returns), strict=True):
            self._experience[name][:, self._own] = own
        names = ("observations", "weights", "actions", "log_probs", "values", "advantages", "returns")
        return Batch(*(self._experience[name].flatten(0, 1) for name in names))

    def parameters(self, size: int) -> Tensor:
        return self._learned["parameters"][:size]

    def moments(self, size: int) -> dict[str, Tensor]:
        return {name: self._learned[name][:size] for name in self._moments}

    def part(self, size: int) -> slice:
        """Return the part that this worker steps: whole cache lines, so that numbers come out as in one long vector."""
        floats = 2 * CACHE_LINE
        lines = -(-size // floats)
        first, last = (floats * (lines * i // self._reduce.num_workers) for i in (self.rank, self.rank + 1))
        return slice(first, min(last, size))

    def vectors(self, size: int) -> list[Tensor]:
        """Return the vectors for the gradients of the pieces."""
        return self._reduce.spare_vectors(size)

    def offer(self, count: int) -> None:
        """Say that there are so many pieces. One worker does it; one that comes too early for it only helps less."""
        self._reduce.use_spares(count)
        if self.rank == 0 and count:
            self._pieces.offer(range(count))

    def take(self) -> Iterator[int]:
        return iter(self._pieces.take, None)

    @property
    def pipe(self) -> int:
        return self._pieces.reading
