"""Several machines: on each the same workers as in parallel mode; the first worker of each talks to the other machines.

A gradient is summed inside the machine through shared memory, then once per machine over Gloo. With `local_sgd` each
machine steps by itself and the parameters are averaged every few updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.execution.in_step.data_parallel import (
    WorkerCourse,
    episode_table,
    sums,
)
from rl_cluster_benchmark.execution.in_step.work_sharing import SharedWork, WorkSharing, num_pieces
from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.execution.machines.follower import Follower
from rl_cluster_benchmark.execution.machines.machine_links import (
    LostContactError,
    MachineLinks,
    MachineSeat,
    join_machines,
    the_leader_does,
)
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.execution.reports import INTERRUPTED, order_of, write_down
from rl_cluster_benchmark.execution.task import Task, deal
from rl_cluster_benchmark.experience.rollout import Episode
from rl_cluster_benchmark.learning.bad_numbers import COUNTS, REWARDS
from rl_cluster_benchmark.learning.reduction import Reducer
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.processes.waiting import keep_core
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run.run import Run

ORDER, SIGNAL = 0, 1  # places in what the parent tells its workers


class NodeWorkers:
    """One machine's part of the run: its workers, what it tells them, and what they tell it."""

    def __init__(self, cluster: Cluster, config: Config, plan: Plan) -> None:
        self.cluster, self.config, self.plan = cluster, config, plan
        self.seat = MachineSeat.of(cluster, config)
        shards = deal(config.env.num_envs, cluster.num_workers)
        self.shards = self.seat.own(shards, plan.num_workers)
        longest = len(shards[0]) * config.training.n_steps
        self.shared = SharedTensors(
            {
                "order": ((2,), torch.int64),
                "episodes": episode_table(plan.num_workers, longest),
            }
        )
        task = Task.of(config)
        self.work = SharedWork(task, self.shards, config, plan) if plan.shares_work(config) else None
        vector, small = sums(config, task)
        spares = num_pieces(plan.num_workers) if self.work else 0
        self.memory = SharedMemoryReducer.allocate(plan.num_workers, vector, small + self.seat.num_nodes, spares)

    def train(
        self, checkpoint: Path | None, progress: dict[str, Any], *, look: Callable[[], int],
        hear: Callable[[int, str, Any], None],
    ) -> None:  # fmt: skip
        """Run the workers to their end. `look` gives the order for them, `hear` gets what they report."""
        membership, received = self.cluster.membership, self.cluster.signals
        has_begun = False

        def watch() -> None:
            if not has_begun:
                received.check()
            order = look()
            if order == INTERRUPTED:
                self.shared["order"][SIGNAL] = received.received or 0
            if order:
                self.shared["order"][ORDER] = order
            membership.check()

        means = (self.shared, self.memory, self.work)
        args = (self.config, self.plan, self.shards, *means, checkpoint, progress, self.seat)
        limit = limit_of(self.config)
        with WorkerPool(_work, self.plan.num_workers, args, self.plan.cores, watchdog=limit) as pool:
            for rank, (kind, content) in pool.messages(watch):
                has_begun |= kind == "started"  # all workers of all machines are ready
                if kind == "lost contact":
                    raise membership.explain(TrainingFailedError(content))
                if kind == "signal elsewhere":
                    self.cluster.take_signal(*content)
                else:
                    hear(rank, kind, content)


def train(run: Run, cluster: Cluster) -> None:
    """On the head: the same, and write everything down."""
    node = NodeWorkers(cluster, run.config, run.plan)

    def hear(rank: int, kind: str, content: Any) -> None:
        if kind == "started":
            if rank == 0:  # it says so when all workers of all machines are ready
                run.start()
        else:
            write_down(run, kind, content)

    node.train(run.resumed_path, run.progress_state(), look=lambda: order_of(run), hear=hear)


def follow(cluster: Cluster, config: Config, plan: Plan, checkpoint: Path | None, progress: dict[str, Any]) -> None:
    """On every other machine."""
    node = NodeWorkers(cluster, config, plan)
    node.train(checkpoint, progress, look=Follower(cluster), hear=lambda rank, kind, content: None)


def _work(
    rank: int, connection: Connection, config: Config, plan: Plan, shards: list[list[int]], shared: SharedTensors,
    memory: SharedTensors, work: SharedWork | None, checkpoint_path: Path | None, progress: dict[str, Any],
    seat: MachineSeat,
) -> None:  # fmt: skip
    """In a worker."""
    from rl_cluster_benchmark.run import checkpoint

    process.prepare_process(plan.num_threads)
    if plan.cores[rank] is not None:
        keep_core()
    course = NodeCourse(rank, connection, config, shared, progress, seat)
    try:
        leaders, beyond = join_machines(seat, rank)
        everywhere = SharedMemoryReducer(memory, rank, course.clock, beyond)
        course.reduce, course.leaders = everywhere, leaders
        alone = config.cluster.sync == "local_sgd"
        reduce: Reducer = WithinMachine(everywhere) if alone else everywhere
        state = checkpoint.load(checkpoint_path) if checkpoint_path else None
        sharing = WorkSharing(work, rank, everywhere) if work else None
        worker = Worker.build(
            config, plan, env_ids=shards[rank], reduce=reduce, course=course, checkpoint=state, sharing=sharing
        )
        course.worker = worker
        learn(worker, course, everywhere)
    except LostContactError as error:
        connection.send(("message", ("lost contact", str(error))))


class WithinMachine:
    """The sum over the workers of this machine only."""

    def __init__(self, everywhere: SharedMemoryReducer) -> None:
        self._everywhere = everywhere

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.total(tensor))

    def total(self, vector: Tensor) -> Tensor:
        return self._everywhere.sum(vector)

    def vector(self, size: int) -> Tensor:
        return self._everywhere.vector(size)


class NodeCourse(WorkerCourse):
    """A worker's view of a run on several machines. The head's first worker reports to the parent."""

    reduce: SharedMemoryReducer
    leaders: MachineLinks | None
    worker: Worker

    def __init__(
        self, rank: int, connection: Connection, config: Config, shared: SharedTensors, progress: dict[str, Any],
        seat: MachineSeat,
    ) -> None:  # fmt: skip
        super().__init__(rank, connection, config, shared, progress)
        self.seat, self.num_workers = seat, seat.total_workers
        self.reports = rank == 0 and seat.node_rank == 0
        self._averages = config.cluster.sync == "local_sgd" and seat.num_nodes > 1
        self._averaged_at = self.updates
        self._save_is_due = False

    def start(self) -> None:
        self._meet()  # nothing is written before all machines are ready
        super().start()

    def record(self, steps: int, episodes: Sequence[Episode], losses: dict[str, float]) -> None:
        # So far they are this machine's, but for bad experience, which all leave out and have counted together.
        if self._averages and REWARDS not in losses:
            losses = self._of_all_machines(losses)
        super().record(steps, episodes, losses)
        if self._averages and self.updates % self.config.cluster.sync_every == 0:
            self.average()

    def _of_all_machines(self, losses: dict[str, float]) -> dict[str, float]:
        """Return the means over the machines that learned something; NaN if none did. Counts are added up."""
        workers_here = len(self.shared["episodes"])
        shares = [value / workers_here if name in COUNTS else value for name, value in losses.items()]
        mine = torch.tensor(shares, dtype=torch.float64)
        is_known = mine.isfinite().double()
        total, known = self.reduce(torch.cat([mine.nan_to_num(0.0, 0.0, 0.0), is_known])).chunk(2)
        sums, means = total.tolist(), (total / known).tolist()
        return {
            name: float(round(sums[place])) if name in COUNTS else means[place] for place, name in enumerate(losses)
        }

    def average(self) -> None:
        """Give all machines the mean of their parameters and optimiser states."""
        leaders, algorithm = self.leaders, self.worker.algorithm
        for vector in algorithm.learner.vectors():
            self.reduce.share(vector, leaders.average if leaders else the_leader_does)
        self.worker.model.weights_changed()
        scale = algorithm.normalize_rewards.scale
        mine = torch.tensor([scale.mean, scale.variance, scale.count], dtype=torch.float64)
        scale.mean, scale.variance, scale.count = (self.reduce(mine) / self.num_workers).tolist()
        self._averaged_at = self.updates

    def finished_episodes(self) -> Tensor | None:
        here = super().finished_episodes()
        return self.leaders.gather(here) if self.leaders is not None and here is not None else here

    def checkpoint_due(self) -> bool:
        """Between two averages a machine's parameters are its own: save when they are everybody's."""
        self._save_is_due |= super().checkpoint_due()
        due = self._save_is_due and (not self._averages or self._averaged_at == self.updates)
        self._save_is_due &= not due
        return due

    def finish(self, state: dict[str, Any]) -> None:
        signals = torch.zeros(self.seat.num_nodes, dtype=torch.float64)
        if self.rank == 0:
            signals[self.seat.node_rank] = float(self.shared["order"][SIGNAL])
        self.reduce(signals)
        if self.rank == 0 and signals.any():
            node = int(signals.argmax())
            self._send("signal elsewhere", (node, int(signals[node])))
        if self._averages and self._averaged_at != self.updates:
            self.average()
            state = self.worker.state()
        super().finish(state)
