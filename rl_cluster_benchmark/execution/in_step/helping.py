"""Workers whose rollout is done look at images for those who are still at theirs.

Cores differ, and everybody waits for the slowest rollout. An environment cannot move to another core, but most of a
step is the network, and the observations lie where everyone can read them. So a worker that is done takes over half of
the images of one that is not, a second one some more, until the rollout of that one is complete.
Only with the network in C: what it makes of an image does not depend on the others in the batch, so the numbers are the
same whoever computes them.
This relies on the order of stores, which x86 keeps: observations and STEP, START and END, then ASKED; features, then
ANSWERED. Whatever was asked is answered before FINISHED, so a helper never leaves in the middle.
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
TAKEN, ASKED, ANSWERED, START, END = range(5)  # of a helper's post: is there one, requests, replies, images asked for
POSTS = 2  # beside each worker
FEWEST_STEPS = 2  # left, for which help comes in time


class SharedHelp:
    """What the parent makes: where workers ask for features and find them."""

    def __init__(self, num_workers: int, num_envs: int, width: int) -> None:
        self.posts = POSTS if POSTS * num_workers <= MOST else 1
        self.memory = SharedTensors(
            {
                "workers": ((num_workers, CACHE_LINE), torch.int64),
                "posts": ((num_workers * self.posts, CACHE_LINE), torch.int64),  # those of a worker side by side
                "features": ((num_envs, width), torch.float32),
            }
        )
        self.free = Claims()  # numbers of posts; who takes one helps there
        self.free.offer(range(min(MOST, num_workers * self.posts)))  # beyond that, workers get no help


class Helping:
    """One worker's end."""

    def __init__(
        self, help: SharedHelp, rank: int, shards: Sequence[slice], observations: Tensor, model: ActorCritic,
        clock: PhaseClock,
    ) -> None:  # fmt: skip
        self._free, self._rank, self._shards, self._clock = help.free, rank, shards, clock
        self._workers, self._posts = help.memory["workers"].numpy(), help.memory["posts"].numpy()
        self._beside = self._posts[rank * help.posts : (rank + 1) * help.posts]
        self._features = help.memory["features"]
        self._observations = observations  # [T, N, *observation_shape] of everyone
        self._model = model
        self._helped = np.arange(len(self._posts)) // help.posts  # the worker beside each post
        images = np.array([shard.stop - shard.start for shard in shards])
        self._can_share = np.arange(len(self._posts)) % help.posts + 2 <= images[self._helped]

    def features(self, t: int) -> Tensor:
        """Of this worker's observations in slot t, which it has just written."""
        own = self._shards[self._rank]
        self._workers[self._rank, STEP] = t
        helpers = [post for post in self._beside if post[TAKEN]]
        if not helpers:
            return self._model.features(self._observations[t, own])
        middle, *ends = division(own, len(helpers))
        for post, start, end in zip(helpers, (middle, *ends), ends, strict=False):
            post[START], post[END] = start, end
            post[ASKED] += 1
        first = self._model.features(self._observations[t, own.start : middle])
        wait_until(lambda: all(post[ANSWERED] == post[ASKED] for post in helpers), self._clock)
        return torch.cat([first, self._features[middle : own.stop]])

    def finish(self, index: int) -> None:
        """This worker's rollout number `index` is made, or given up: help the others until theirs are, too."""
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
        """Posts that are free."""
        workers, steps = self._workers, len(self._observations)
        is_late = (workers[:, FINISHED] <= index) & (workers[:, STEP] <= steps - FEWEST_STEPS)
        return np.flatnonzero(is_late[self._helped] & (self._posts[:, TAKEN] == 0) & self._can_share).tolist()

    def _claim(self, index: int) -> int | None:
        """Of the posts that no other has just claimed: beside a worker without help, if there is one, far behind."""
        numbers = list(iter(self._free.take, None))
        in_need = set(numbers).intersection(self._in_need(index))
        chosen = min(in_need, key=self._urgency, default=None)
        self._free.offer(number for number in numbers if number != chosen)
        return chosen

    def _urgency(self, number: int) -> tuple[int, int]:
        worker = self._helped[number]
        return int(self._posts[self._helped == worker, TAKEN].sum()), int(self._workers[worker, STEP])

    def _help(self, number: int, index: int) -> None:
        post, theirs = self._posts[number], self._workers[self._helped[number]]
        post[TAKEN] = 1

        def is_asked_or_done() -> bool:
            return bool(post[ASKED] > post[ANSWERED] or theirs[FINISHED] > index)

        while True:
            wait_until(is_asked_or_done, self._clock)
            if post[ASKED] == post[ANSWERED]:
                break
            images = slice(post[START], post[END])
            with self._clock.phase("inference"):
                self._features[images] = self._model.features(self._observations[theirs[STEP], images])
            post[ANSWERED] += 1
        post[TAKEN] = 0
        self._free.offer([number])


def division(shard: slice, num_helpers: int) -> list[int]:
    """Where the part of each ends, the worker's own first: it is the slowest, and has the smallest."""
    count = shard.stop - shard.start
    ends = [shard.start + max(1, count // (num_helpers + 1))]
    for others in range(num_helpers, 0, -1):
        ends.append(ends[-1] + -(-(shard.stop - ends[-1]) // others))
    return ends
