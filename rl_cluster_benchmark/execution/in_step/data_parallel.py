"""PPO and A2C on all cores of one machine or of several: workers that own their environments and their rollouts.

Experience never moves; gradients do. Each worker computes gradients, their sum is made through shared memory and, if
there are several machines, once per machine over Gloo; all go on with the same parameters. With `local_sgd` each
machine steps by itself, and the parameters are averaged every few updates. A machine's parent process only watches;
that of the head, or of a machine alone, also writes files and shows progress.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.in_step import worker_course
from rl_cluster_benchmark.execution.in_step.local_steps import LocalSteps, WithinMachine
from rl_cluster_benchmark.execution.in_step.work_sharing import SharedWork, WorkSharing, num_pieces
from rl_cluster_benchmark.execution.in_step.worker_course import ORDER, SIGNAL, CommonUpdates, WorkerCourse
from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_links import LostContactError, MachineShare, join_machines
from rl_cluster_benchmark.execution.messages import (
    INTERRUPTED,
    AllStarted,
    LostContact,
    Report,
    SignalElsewhere,
    Started,
)
from rl_cluster_benchmark.execution.reduce import SMALL_SPARE, VECTOR_SPARE, SharedMemoryReducer
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.learning.reduction import Reducer
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.processes.waiting import keep_core
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run.run import Run


class DataParallelMachine:
    """One machine's workers, and what they share; see training/executions.py for what is asked of it."""

    def __init__(self, cluster: Cluster | MachineAlone, share: MachineShare) -> None:
        config, plan = share.config, share.plan
        self.cluster, self.share, self.shards = cluster, share, share.shards()
        longest = max(map(len, self.shards)) * config.training.n_steps
        self.shared = SharedTensors(worker_course.layout(plan.num_workers, longest))
        task = Task.of(config)
        self.shared_work = SharedWork(task, self.shards, config, plan) if plan.shares_work(config) else None
        vector, small = _sums(config, task)
        spares = num_pieces(plan.num_workers) if self.shared_work else 0
        self.memory = SharedMemoryReducer.allocate(plan.num_workers, vector, small + share.seat.num_nodes, spares)

    def updates(self, run: Run) -> CommonUpdates:
        return CommonUpdates(run)

    def train(self, *, look: Callable[[], int], start: Callable[[], None], hear: Callable[[int, Report], None]) -> None:
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

        plan, limit = self.share.plan, limit_of(self.share.config)
        args = (self.share, self.shards, self.shared, self.memory, self.shared_work)
        with WorkerPool(_work, plan.num_workers, args, plan.cores, watchdog=limit) as pool:
            for _, message in pool.messages(watch):
                match message:
                    case LostContact(reason):
                        raise membership.explain(TrainingFailedError(reason))
                    case SignalElsewhere(node, number):
                        self.cluster.take_signal(node, number)
                    case AllStarted():
                        has_begun = True
                        start()
                    case _:
                        hear(self.cluster.rank, message)


def _sums(config: Config, task: Task) -> tuple[int, int]:
    """Return how much is summed at once: floats for gradient and loss statistics, doubles for anything else."""
    minibatches = config.training.n_epochs * -(-config.rollout_size // config.batch_size)
    return task.num_parameters + VECTOR_SPARE, 3 * minibatches + SMALL_SPARE


def _work(
    rank: int, connection: Connection, share: MachineShare, shards: list[list[int]], shared: SharedTensors,
    memory: SharedTensors, shared_work: SharedWork | None,
) -> None:  # fmt: skip
    """Run a worker, in its process."""
    config, plan, seat, progress = share.config, share.plan, share.seat, share.progress
    process.prepare_process(plan.num_threads)
    if plan.cores[rank] is not None:
        keep_core()
    clock, updates = PhaseClock(), progress["updates"]
    try:
        links, beyond = join_machines(seat, rank)
        hidden = shared_work.hidden_gradient(rank) if shared_work else None
        everywhere = SharedMemoryReducer(memory, rank, clock, beyond, hidden)
        steps_alone = config.cluster.sync == "local_sgd" and seat.num_nodes > 1
        reduce: Reducer = WithinMachine(everywhere) if steps_alone else everywhere
        sharing = WorkSharing(shared_work, rank, everywhere) if shared_work else None
        worker = Worker.build(
            config, plan, env_ids=shards[rank], reduce=reduce, clock=clock, incarnation=updates,
            checkpoint=share.checkpoint(), sharing=sharing,
        )  # fmt: skip
        local_steps = None
        if steps_alone:
            every, total_workers = config.cluster.sync_every, seat.total_workers
            local_steps = LocalSteps(
                worker, everywhere, links, every=every, total_workers=total_workers, updates=updates
            )
        course = WorkerCourse(
            rank, seat, connection, config, shared, progress,
            clock=clock, reduce=everywhere, links=links, local_steps=local_steps,
        )  # fmt: skip
        connection.send(Started(f"Worker {rank} started with {len(shards[rank])} environments"))
        learn(worker, course, everywhere)
    except LostContactError as error:
        connection.send(LostContact(str(error)))
