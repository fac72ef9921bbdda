"""Workers whose rollout is done look at images for those who are still at theirs.

Cores differ, and everybody waits for the slowest rollout. An environment cannot move to another core, but most of a
step is the network, and the observations lie where everyone can read them. So a worker that is done takes over half of
the images of one that is not, until the rollout of that one is complete.
Only with the network in C: what it makes of an image does not depend on the others in the batch, so the numbers are the
same whoever computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_cluster_benchmark.execution.claims import Claims
from rl_cluster_benchmark.execution.shared import SharedTensors
from rl_cluster_benchmark.execution.waiting import wait_until
from rl_cluster_benchmark.models import ActorCritic
from rl_cluster_benchmark.timing import PhaseClock

STEP, ASKED, ANSWERED, IS_HELPED, FINISHED = range(5)  # of a worker: its slot, requests, replies, -, rollouts made
FEWEST_STEPS = 2  # left, for which help comes in time


class SharedHelp:
    """What the parent makes: where workers ask for features and find them."""

    def __init__(self, num_workers: int, num_envs: int, width: int) -> None:
        self.memory = SharedTensors(
            {
                "board": ((num_workers, 8), torch.int64),  # a cache line for each
                "features": ((num_envs, width), torch.float32),
            }
        )
        self.unhelped = Claims()  # numbers of the workers whom nobody helps; who takes one helps that one
        self.unhelped.offer(range(num_workers))


class Helping:
    """One worker's end."""

    def __init__(
        self, help: SharedHelp, rank: int, shards: Sequence[slice], observations: Tensor, model: ActorCritic,
        clock: PhaseClock,
    ) -> None:  # fmt: skip
        self._unhelped, self._rank, self._shards, self._clock = help.unhelped, rank, shards, clock
        self._board = help.memory["board"].numpy()
        self._features = help.memory["features"]
        self._observations = observations  # [T, N, *observation_shape] of everyone
        self._model = model
        self._can_share = np.array([shard.stop - shard.start > 1 for shard in shards])

    def features(self, t: int) -> Tensor:
        """Of this worker's observations in slot t, which it has just written."""
        own, mine = self._shards[self._rank], self._board[self._rank]
        mine[STEP] = t
        if not mine[IS_HELPED]:
            return self._model.features(self._observations[t, own])
        request = mine[ASKED] + 1
        mine[ASKED] = request
        middle = _middle(own)
        first = self._model.features(self._observations[t, own.start : middle])
        wait_until(lambda: bool(mine[ANSWERED] == request), self._clock)
        return torch.cat([first, self._features[middle : own.stop]])

    def finish(self, index: int) -> None:
        """This worker's rollout number `index` is made, or given up: help the others until theirs are, too."""
        self._board[self._rank, FINISHED] = index + 1
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
        return bool((self._board[:, FINISHED] > index).all())

    def _in_need(self, index: int) -> list[int]:
        """Whom nobody helps."""
        board, steps = self._board, len(self._observations)
        is_late = (board[:, FINISHED] <= index) & (board[:, STEP] <= steps - FEWEST_STEPS)
        return np.flatnonzero(is_late & (board[:, IS_HELPED] == 0) & self._can_share).tolist()

    def _claim(self, index: int) -> int | None:
        """The worker that is farthest behind, of those that need help and that no other helper has just claimed."""
        numbers = list(iter(self._unhelped.take, None))
        in_need = set(numbers).intersection(self._in_need(index))
        slowest = min(in_need, key=lambda number: int(self._board[number, STEP]), default=None)
        self._unhelped.offer(number for number in numbers if number != slowest)
        return slowest

    def _help(self, number: int, index: int) -> None:
        theirs, shard = self._board[number], self._shards[number]
        half = slice(_middle(shard), shard.stop)
        theirs[IS_HELPED] = 1

        def is_asked_or_done() -> bool:
            return bool(theirs[ASKED] > theirs[ANSWERED] or theirs[FINISHED] > index)

        while True:
            wait_until(is_asked_or_done, self._clock)
            if theirs[ASKED] == theirs[ANSWERED]:
                break
            with self._clock.phase("inference"):
                self._features[half] = self._model.features(self._observations[theirs[STEP], half])
            theirs[ANSWERED] += 1
        theirs[IS_HELPED] = 0
        self._unhelped.offer([number])


def _middle(shard: slice) -> int:
    """The first of the environments that a helper takes."""
    return (shard.start + shard.stop + 1) // 2
