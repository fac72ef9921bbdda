"""What IMPALA's actors and learners share on one machine."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from rl_cluster_benchmark.execution.actor_learner.leading_learner import StepBoard
from rl_cluster_benchmark.execution.actor_learner.unrolls import UnrollStore
from rl_cluster_benchmark.execution.machines import machine_supervisor
from rl_cluster_benchmark.execution.machines.machine_links import MachineShare
from rl_cluster_benchmark.execution.machines.other_machines import IndependentMachines
from rl_cluster_benchmark.execution.messages import Started
from rl_cluster_benchmark.execution.reduce import SMALL_SPARE, VECTOR_SPARE, SharedMemoryReducer
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.claims import Claims
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors
from rl_cluster_benchmark.processes.waiting import wait_until


class Shared:
    """What the processes of a run share on one machine. Handed to a spawned process, it is the same there."""

    def __init__(self, share: MachineShare) -> None:
        config, plan, seat = share.config, share.plan, share.seat
        self.share, self.config, self.plan, self.seat = share, config, plan, seat
        self.task = Task.of(config)
        self.shards = share.shards()
        self.num_learners = plan.num_learners
        each = config.unrolls_per_learner(seat.total_learners)
        unrolls_per_step = each * seat.total_learners
        self.steps_per_update = max(1, round(config.env.num_envs / unrolls_per_step)) * config.impala.passes
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
        """Return whether this machine takes its own steps, beside others."""
        return self.seat.num_nodes > 1 and self.config.cluster.sync == "async"

    @property
    def saves(self) -> bool:
        """Return whether this machine's leader saves for all machines."""
        return self.seat.node_rank == 0

    @property
    def num_exchanges(self) -> int:
        """Return how many corrections of the parameters other machines have led to."""
        return int(self.flags["written"][0]) if self.is_on_its_own else 0

    def start(self, connection: Connection, keeper: process_times.TimeKeeper, greeting: str) -> None:
        """Say that this process is ready, and wait until all are. Time counts from then on."""
        connection.send(Started(greeting))
        go, board = self.flags["go"].numpy(), self.board()
        wait_until(lambda: bool(go[0]) or board.stopped, keeper.clock)
        keeper.start()

    def board(self) -> StepBoard:
        return StepBoard(self.flags, self.num_learners, self.plan.micro_batch // self.config.training.n_steps)

    def store(self) -> UnrollStore:
        return UnrollStore(self.unrolls, self.shards)

    def name(self, rank: int) -> str:
        return f"Learner {rank}" if rank < self.num_learners else f"Actor {rank - self.num_learners}"
