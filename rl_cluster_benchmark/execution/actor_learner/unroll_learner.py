"""What one of IMPALA's learners does in a step: take unrolls while there are any, add their gradients, step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rl_cluster_benchmark.algorithms.impala import Impala, Unrolls
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.actor_learner.leading_learner import REPLAY, StepBoard
from rl_cluster_benchmark.execution.actor_learner.replay import ReplayFile
from rl_cluster_benchmark.execution.actor_learner.unrolls import Fields, UnrollStore, gather
from rl_cluster_benchmark.experience.returns import scaled
from rl_cluster_benchmark.processes.claims import Claims


class UnrollLearner:
    """One learner's part in the steps."""

    def __init__(
        self, config: Config, algorithm: Impala, board: StepBoard, claims: Claims, store: UnrollStore,
        replay: ReplayFile | None, random: np.random.Generator,
    ) -> None:  # fmt: skip
        """`random` chooses what comes from the replay, if there is one."""
        self.config, self.algorithm, self.board, self.claims, self.store = config, algorithm, board, claims, store
        self._replay, self._random = replay, random

    def learn(self, clock: PhaseClock) -> dict[str, float]:
        """Take the step on the board, together with the other learners, and return its losses."""
        self.algorithm.begin()
        while (number := self.claims.take()) is not None:
            places = self._places(self.board.group(number), clock)
            if places:
                self.algorithm.add(self._unrolls(places))
        return self.algorithm.finish(self.board.rate)

    def _places(self, rows: Sequence[int], clock: PhaseClock) -> list[tuple[Fields, int]]:
        places: list[tuple[Fields, int]] = [(self.store, row) for row in rows if row != REPLAY]
        if self._replay is not None:
            with clock.phase("communication"):
                old = sum(row == REPLAY for row in rows)
                drawn = self._replay.sample(old, self._random) if old and len(self._replay) else []
                for fields, row in places:
                    self._replay.add(fields, row)
            places += drawn
        return places

    def _unrolls(self, places: Sequence[tuple[Fields, int]]) -> Unrolls:
        unrolls = gather(places)
        if not self.config.training.normalize_reward:
            return unrolls
        return dataclasses.replace(unrolls, rewards=scaled(unrolls.rewards, self.board.divisor))
