"""Workers whose rollout is done look at images for those who are still at theirs.

Cores differ, and everybody waits for the slowest rollout. An environment cannot move to another core, but most of a
step is the network, and the observations lie where everyone can read them. So a worker that is done takes over half of
the images of one that is not, until the rollout of that one is complete.
Only with the network in C: what it makes of an image does not depend on the others in the batch, so the numbers are the
same whoever computes them.
This relies on the order of stores, which x86 keeps: observations and STEP, then ASKED; features, then ANSWERED.
Whatever was asked is answered before FINISHED, so a helper never leaves in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.nets.models import ActorCritic
from rl_cluster_benchmark.processes.claims import MOST, Claims
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors
from rl_cluster_benchmark.processes.waiting import wait_until

STEP, FINISHED = range(2)  # of a worker: its slot, rollouts made
TAKEN, ASKED, ANSWERED = range(3)  # of the post beside a worker: has it a helper, requests, replies
FEWEST_STEPS = 2  # left, for which help comes in time


class SharedHelp:
    """What the parent makes: where workers ask for features and find them."""

    def __init__(self, num_workers: int, num_envs: int, width: int) -> None:
        self.memory = SharedTensors(
            {
                "workers": ((num_workers, CACHE_LINE), torch.int64),
                "posts": ((num_workers, CACHE_LINE), torch.int64),
                "features": ((num_envs, width), torch.float32),
            }
        )
        self.free = Claims()  # numbers of workers; who takes one helps that worker
        self.free.offer(range(min(MOST, num_workers)))  # workers beyond that get no help


class Helping:
    """One worker's part in it: asking for help, and giving it."""

    def __init__(
        self, help: SharedHelp, rank: int, shards: Sequence[slice], observations: Tensor, model: ActorCritic,
        clock: PhaseClock,
    ) -> None:  # fmt: skip
        self._free, self._rank, self._shards, self._clock = help.free, rank, shards, clock
        self._workers, self._posts = help.memory["workers"].numpy(), help.memory["posts"].numpy()
        self._features = help.memory["features"]
        self._observations = observations  # [T, N, *observation_shape] of everyone
        self._model = model
        self._can_share = np.array([shard.stop - shard.start > 1 for shard in shards])

    def features(self, t: int) -> Tensor:
        """Return the features of this worker's observations in slot t, which it has just written."""
        own, post = self._shards[self._rank], self._posts[self._rank]
        self._workers[self._rank, STEP] = t
        if not post[TAKEN]:
            return self._model.features(self._observations[t, own])
        post[ASKED] += 1
        middle = helpers_half(own).start
        first = self._model.features(self._observations[t, own.start : middle])
        wait_until(lambda: bool(post[ANSWERED] == post[ASKED]), self._clock)
        return torch.cat([first, self._features[middle : own.stop]])

    def finish(self, index: int) -> None:
        """Help the others until their rollouts are made: this worker's, number `index`, is made or given up."""
        self._workers[self._rank, FINISHED] = index + 1
        claimed: int | None = None

        def has_claimed_or_is_over() -> bool:
            nonlocal claimed
            claimed = self._claim(index) if self._in_need(index) else None
            return claimed is not None or self._all_finished(index)

        while True:
            wait_until(has_claimed_or_is_over, self._clock)
            if claimed is None:
                return
            self._help(claimed, index)

    def _all_finished(self, index: int) -> bool:
        return bool((self._workers[:, FINISHED] > index).all())

    def _in_need(self, index: int) -> list[int]:
        """Return the workers that help would still reach in time, and that have none."""
        workers, steps = self._workers, len(self._observations)
        is_late = (workers[:, FINISHED] <= index) & (workers[:, STEP] <= steps - FEWEST_STEPS)
        return np.flatnonzero(is_late & (self._posts[:, TAKEN] == 0) & self._can_share).tolist()

    def _claim(self, index: int) -> int | None:
        """Take the post beside the worker that is farthest behind, of those that no other has just claimed."""
        numbers = list(iter(self._free.take, None))
        in_need = set(numbers).intersection(self._in_need(index))
        chosen = min(in_need, key=lambda number: int(self._workers[number, STEP]), default=None)
        self._free.offer(number for number in numbers if number != chosen)
        return chosen

    def _help(self, number: int, index: int) -> None:
        post, theirs, images = self._posts[number], self._workers[number], helpers_half(self._shards[number])
        post[TAKEN] = 1

        def is_asked_or_done() -> bool:
            return bool(post[ASKED] > post[ANSWERED] or theirs[FINISHED] > index)

        while True:
            wait_until(is_asked_or_done, self._clock)
            if post[ASKED] == post[ANSWERED]:
                break
            with self._clock.phase("inference"):
                self._features[images] = self._model.features(self._observations[theirs[STEP], images])
            post[ANSWERED] += 1
        post[TAKEN] = 0
        self._free.offer([number])


def helpers_half(shard: slice) -> slice:
    """Return the images of a worker that its helper looks at; of an odd number, the worker keeps the smaller half."""
    return slice(shard.start + (shard.stop - shard.start) // 2, shard.stop)
