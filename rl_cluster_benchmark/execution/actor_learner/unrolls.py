"""Where actors put unrolls and learners read them: preallocated shared memory, and counters instead of queues.

Each actor has a few pages of its own. A page holds an unroll of each of its environments, and is written in place while
they are stepped. `written` counts how often a page was filled, `consumed` how often each of its unrolls was learned
from; an unroll is there to be learned from while the first is ahead, a page is free when all of its unrolls have caught
up. Every number has one writer, so nothing is locked, and an actor killed at any moment leaves nothing half-done: what
it had not finished was never there. This relies on the order of stores, which x86 keeps: the
page before `written`; and a learner has read the page before it stores `consumed`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.algorithms.impala import Unrolls
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors

STEP_FIELDS = ("actions", "log_probs", "rewards", "terminated", "truncated", "valid")

UnrollLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Fields(Protocol):
    """Named tensors; row i of each belongs to unroll i."""

    def __getitem__(self, name: str) -> Tensor: ...


def unroll_layout(task: Task, n_steps: int) -> UnrollLayout:
    """Return the shape and the type of each field of one unroll."""
    return {
        "observations": ((n_steps + 1, *task.observation_shape), task.observation_dtype),
        "actions": ((n_steps,), torch.int64),
        "log_probs": ((n_steps,), torch.float32),
        "rewards": ((n_steps,), torch.float32),
        "terminated": ((n_steps,), torch.bool),
        "truncated": ((n_steps,), torch.bool),
        "valid": ((n_steps,), torch.bool),
    }


def gather(places: Sequence[tuple[Fields, int]]) -> Unrolls:
    """Return unrolls from where they lie: observations as views, the rest, which is small, copied. Rewards are raw."""
    steps = {name: torch.stack([fields[name][row] for fields, row in places], dim=1) for name in STEP_FIELDS}
    observations = [fields["observations"][row] for fields, row in places]
    return Unrolls([frames[:-1] for frames in observations], [frames[-1] for frames in observations], **steps)


class UnrollStore:
    """One process's view of the pages of all actors."""

    @staticmethod
    def allocate(
        task: Task, *, num_actors: int, envs_per_actor: int, n_steps: int, pages_per_actor: int
    ) -> SharedTensors:
        pages = num_actors * pages_per_actor
        rows = {
            name: ((pages, envs_per_actor, *shape), dtype)
            for name, (shape, dtype) in unroll_layout(task, n_steps).items()
        }
        return SharedTensors(
            {
                **rows,
                "return_moments": ((pages, envs_per_actor, 3), torch.float64),
                "written": ((pages, CACHE_LINE), torch.int64),
                "consumed": ((pages, envs_per_actor), torch.int64),
                "version": ((pages,), torch.int64),  # of the weights it was made with
                "finished": ((pages,), torch.float64),  # when, by the clock that all processes share
            }
        )

    def __init__(self, memory: SharedTensors, shards: Sequence[Sequence[int]]) -> None:
        self._memory = memory
        self.shards = shards
        pages, self.envs_per_page = memory["consumed"].shape
        self.pages_per_actor = pages // len(shards)
        self._written, self._consumed = memory["written"][:, 0].numpy(), memory["consumed"].numpy()
        self._flat = {name: memory[name].flatten(0, 1) for name in ("observations", *STEP_FIELDS, "return_moments")}
        sizes = np.repeat([len(shard) for shard in shards], self.pages_per_actor)
        self._exists = np.arange(self.envs_per_page) < sizes[:, None]  # [pages, envs]: actors may differ by one

    def __getitem__(self, name: str) -> Tensor:
        """Return a field of all unrolls, with row page * envs_per_page + env."""
        return self._flat[name]

    # An actor's side

    def free_page(self, actor: int) -> int | None:
        for page in range(actor * self.pages_per_actor, (actor + 1) * self.pages_per_actor):
            if (self._consumed[page, : len(self.shards[actor])] == self._written[page]).all():
                return page
        return None

    def rollout(self, actor: int, page: int) -> Rollout:
        """Return the page as a rollout to be filled: [T, N] views of its memory."""
        num_envs = len(self.shards[actor])
        observations = self._memory["observations"][page, :num_envs]  # [N, T + 1, ...]
        steps = {name: self._memory[name][page, :num_envs].t() for name in STEP_FIELDS}
        return Rollout(
            observations=observations[:, :-1].transpose(0, 1),
            last_observations=observations[:, -1],
            values=torch.zeros(steps["actions"].shape),  # the learner finds its own
            last_values=torch.zeros(num_envs),
            **steps,  # type: ignore[arg-type]
        )

    def publish(self, actor: int, page: int, *, version: int, return_moments: Tensor) -> None:
        """Give a full page to the learners."""
        self._memory["version"][page] = version
        self._memory["return_moments"][page, : len(self.shards[actor])] = return_moments
        self._memory["finished"][page] = time.monotonic()
        self._written[page] += 1  # last: from here on it may be read

    # The side of the one learner that hands unrolls out

    def full(self) -> NDArray[np.int64]:
        """Return the rows of the unrolls to be learned from, oldest first."""
        pages, envs = np.nonzero((self._written[:, None] > self._consumed) & self._exists)
        order = np.argsort(self._memory["finished"].numpy()[pages], kind="stable")
        return (pages * self.envs_per_page + envs)[order]

    def release(self, rows: NDArray[np.int64]) -> None:
        """Give back unrolls that have been learned from."""
        pages, envs = np.divmod(rows, self.envs_per_page)
        self._consumed[pages, envs] = self._written[pages]

    @property
    def capacity(self) -> int:
        return int(self._exists.sum())

    def versions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._memory["version"].numpy()[rows // self.envs_per_page]

    def ages(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds since these unrolls were finished."""
        return time.monotonic() - self._memory["finished"].numpy()[rows // self.envs_per_page]
