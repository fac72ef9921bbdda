"""A process that learns from what IMPALA's actors have played."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rl_cluster_benchmark.algorithms.impala import Impala, Unrolls
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.seeding import stream
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.actor_learner.leading_learner import REPLAY, LeadingLearner, StepBoard
from rl_cluster_benchmark.execution.actor_learner.replay import ReplayFile
from rl_cluster_benchmark.execution.actor_learner.unrolls import Fields, UnrollStore, gather, unroll_layout
from rl_cluster_benchmark.execution.loop import build_algorithm, state_of
from rl_cluster_benchmark.execution.machines.machine_links import join_machines
from rl_cluster_benchmark.execution.machines.other_machines import (
    Corrections,
    IndependentMachines,
    MachinesInStep,
    OtherMachines,
)
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.experience.returns import scaled
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.claims import Claims
from rl_cluster_benchmark.processes.published_weights import PublishedWeights


def learn_in_step(
    rank: int, connection: Connection, shared: Shared, progress: dict[str, Any], keeper: process_times.TimeKeeper
) -> None:
    """Learn step after step from the unrolls that the leader, the first learner, hands out."""
    config, plan, task, clock, flags = shared.config, shared.plan, shared.task, keeper.clock, shared.flags
    reduce, others = _join(rank, shared, clock)
    model, algorithm = build_algorithm(
        config, plan, task.observation_shape, task.num_actions, env_ids=(), reduce=reduce,
        checkpoint=shared.share.checkpoint(),
    )  # fmt: skip
    assert isinstance(algorithm, Impala)
    store, board, corrections = shared.store(), shared.board(), Corrections(flags)
    replay = None
    if config.impala.replay_fraction > 0:
        share = -(-config.impala.replay_size // shared.num_learners)
        replay = ReplayFile(shared.share.folder, share, unroll_layout(task, config.training.n_steps))
    random = stream(config.env.seed, "replay", rank + shared.seat.first_learner, progress["updates"])
    lessons = UnrollLearner(config, algorithm, board, shared.claims, store, replay, random)
    leader = None
    if rank == 0:
        weights = PublishedWeights(shared.weights)
        weights.publish(algorithm.learner.flat)
        leader = LeadingLearner(
            config, flags, board, shared.claims, store, weights, algorithm, connection, keeper, progress, others,
            shared.steps_per_update,
        )  # fmt: skip
    shared.start(connection, keeper, f"Learner {rank} started")
    step = 0
    while True:
        step += 1
        if leader is not None:
            leader.hand_out(clock)
        if not board.wait(step, clock):
            break
        correction = board.correction  # when the gradients have met, the next step may have been announced
        with clock.phase("update"):
            losses = lessons.learn(clock)
        if correction:
            corrections.add_to(algorithm.learner, correction)
        keeper.write()
        if leader is not None and leader.step_done(losses):
            leader.record()
            if shared.saves and leader.checkpoint_due():
                leader.save(state_of(model, algorithm, task.observation_shape, task.num_actions))
    if leader is not None:
        leader.record()
        leader.wait_for_others()
        if shared.saves:
            leader.finish(state_of(model, algorithm, task.observation_shape, task.num_actions))


def _join(rank: int, shared: Shared, clock: PhaseClock) -> tuple[SharedMemoryReducer, OtherMachines]:
    """Return the sum over learners that take a step together, and what the leader knows of other machines."""
    seat, flags = shared.seat, shared.flags
    if shared.is_on_its_own:
        return SharedMemoryReducer(shared.sums, rank, clock), IndependentMachines(flags)
    leaders, beyond = join_machines(seat, rank)
    others = MachinesInStep(flags, leaders.sum, is_head=seat.node_rank == 0) if leaders else OtherMachines(flags)
    return SharedMemoryReducer(shared.sums, rank, clock, beyond), others


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
