"""What IMPALA's actors and learners share on one machine."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.actor_learner.leading_learner import StepBoard
from rl_cluster_benchmark.execution.actor_learner.unrolls import UnrollStore
from rl_cluster_benchmark.execution.machines import machine_supervisor
from rl_cluster_benchmark.execution.machines.machine_links import MachineSeat
from rl_cluster_benchmark.execution.machines.other_machines import IndependentMachines
from rl_cluster_benchmark.execution.reduce import SMALL_SPARE, VECTOR_SPARE, SharedMemoryReducer
from rl_cluster_benchmark.execution.task import Task, deal
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.claims import Claims
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors


class Shared:
    """What the processes of a run share on one machine. Handed to a spawned process, it is the same there."""

    def __init__(
        self, config: Config, plan: Plan, folder: Path, resumed_path: Path | None, seat: MachineSeat | None = None
    ) -> None:
        """`seat` is this machine's among several."""
        self.config, self.plan, self.folder, self.resumed_path, self.seat = config, plan, folder, resumed_path, seat
        self.task = Task.of(config)
        shards = deal(config.env.num_envs, seat.total_workers if seat else plan.num_workers)
        self.shards = seat.own(shards, plan.num_workers) if seat else shards
        self.num_learners = plan.num_learners
        learners = seat.total_learners if seat else plan.num_learners
        each = config.unrolls_per_learner(learners)
        self.steps_per_update = max(1, round(config.env.num_envs / (each * learners))) * config.impala.passes
        size = self.task.num_parameters
        self.flags = SharedTensors(
            {
                **machine_supervisor.layout(),
                **StepBoard.layout(min(each * plan.num_learners, sum(map(len, self.shards)))),
                "left_out": ((len(self.shards), CACHE_LINE), torch.int64),  # steps of each actor's bad unrolls
                **process_times.layout(self.num_learners + len(self.shards)),
                **(IndependentMachines.layout(size) if self.is_on_its_own else {}),
            }
        )
        self.unrolls = UnrollStore.allocate(
            self.task,
            num_actors=len(self.shards),
            envs_per_actor=max(map(len, self.shards)),
            n_steps=config.training.n_steps,
            pages_per_actor=config.impala.pages_per_actor,
        )
        self.weights = PublishedWeights.allocate(size)
        self.claims = Claims()
        self.sums = SharedMemoryReducer.allocate(self.num_learners, size + VECTOR_SPARE, SMALL_SPARE)

    @property
    def is_on_its_own(self) -> bool:
        """Does this machine take its own steps, beside others?"""
        return self.seat is not None and self.config.cluster.sync == "async"

    @property
    def saves(self) -> bool:
        return self.seat is None or self.seat.node_rank == 0

    def board(self) -> StepBoard:
        return StepBoard(self.flags, self.num_learners, self.plan.micro_batch // self.config.training.n_steps)

    def store(self) -> UnrollStore:
        return UnrollStore(self.unrolls, self.shards)

    def name(self, rank: int) -> str:
        return f"Learner {rank}" if rank < self.num_learners else f"Actor {rank - self.num_learners}"
