"""Every core of one machine: workers that own their environments and their rollouts.

Experience never moves; gradients do. Each worker computes gradients, the sum over all workers is made through shared
memory, and all go on with the same parameters. The parent only watches, writes files and shows progress.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl_cluster_benchmark.config.schema import MAX_ENVS, Config
from rl_cluster_benchmark.core.timing import PHASES, PhaseClock
from rl_cluster_benchmark.execution.in_step.work_sharing import SharedWork, WorkSharing, num_pieces
from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.execution.reduce import SMALL_SPARE, VECTOR_SPARE, SharedMemoryReducer, gloo_file, join
from rl_cluster_benchmark.execution.reports import INTERRUPTED, TIME_IS_UP, reports, write_down
from rl_cluster_benchmark.execution.task import Task, deal
from rl_cluster_benchmark.experience.rollout import Episode
from rl_cluster_benchmark.learning.reduction import Reducer
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.processes.waiting import keep_core
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run


def train(run: Run) -> None:
    """In the parent: start the workers, write down what they report, tell them when to stop."""
    config, plan = run.config, run.plan
    num_workers = plan.num_workers
    shards = deal(config.env.num_envs, num_workers)
    longest = max(map(len, shards)) * config.training.n_steps
    shared = SharedTensors(
        {
            "order": ((1,), torch.int64),
            "episodes": episode_table(num_workers, longest),
        }
    )
    task = Task.of(config)
    work = SharedWork(task, shards, config, plan) if plan.shares_work(config) else None
    spares = num_pieces(num_workers) if work else 0
    through_gloo = config.parallel.reduce == "gloo"
    means = gloo_file() if through_gloo else SharedMemoryReducer.allocate(num_workers, *sums(config, task), spares)
    args = (config, plan, shards, shared, means, work, run.resumed_path, run.progress_state())

    with WorkerPool(_work, num_workers, args, plan.cores, watchdog=limit_of(config)) as pool:
        for kind, content in reports(run, pool, shards, shared["order"]):
            write_down(run, kind, content)


def episode_table(num_workers: int, longest: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and type of what each worker writes its finished episodes to; the first row says how many."""
    return (num_workers, longest + 1, len(Episode._fields)), torch.float64


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Sort episodes by when they ended, those of one moment by their environments: whoever played, it is the same."""
    slots, env_ids = rows[:, 2].long(), rows[:, 3].long()
    return rows[torch.argsort(slots * MAX_ENVS + env_ids)]


def _work(
    rank: int, connection: Connection, config: Config, plan: Plan, shards: list[list[int]], shared: SharedTensors,
    means: SharedTensors | str, work: SharedWork | None, resumed_path: Path | None, progress: dict[str, Any],
) -> None:  # fmt: skip
    """In a worker."""
    process.prepare_process(plan.num_threads)
    if plan.cores[rank] is not None:
        keep_core()
    course = WorkerCourse(rank, connection, config, shared, progress)
    reduce = join(means, rank, len(shards), course.clock)
    course.reduce = reduce
    sharing = WorkSharing(work, rank, reduce) if work and isinstance(reduce, SharedMemoryReducer) else None
    state = checkpoint.load(resumed_path) if resumed_path else None
    worker = Worker.build(
        config, plan, env_ids=shards[rank], reduce=reduce, course=course, checkpoint=state, sharing=sharing
    )
    learn(worker, course, reduce)


class WorkerCourse:
    """A worker's view of the run. All workers hold the same counters; the first one reports to the parent."""

    reduce: Reducer

    def __init__(
        self, rank: int, connection: Connection, config: Config, shared: SharedTensors, progress: dict[str, Any]
    ) -> None:
        self.rank, self.connection, self.config, self.shared = rank, connection, config, shared
        self.num_workers, self.reports = len(shared["episodes"]), rank == 0
        self.clock = PhaseClock()
        self.steps, self.updates = progress["steps"], progress["updates"]
        self._elapsed, self._seconds_before = progress["elapsed"], progress["phase_seconds"]
        self._elapsed_before = self._elapsed

    @property
    def fraction(self) -> float:
        """By steps or by time, whichever ends the run first; the same on all workers, as of the last update."""
        training = self.config.training
        by_time = self._elapsed / (training.duration_hours * 3600) if training.duration_hours else 0.0
        return min(1.0, max(self.steps / training.total_timesteps, by_time))

    def is_complete(self) -> bool:
        return self.steps >= self.config.training.total_timesteps

    def should_stop(self) -> bool:
        order = int(self.shared["order"][0])
        return order == INTERRUPTED or (order == TIME_IS_UP and self.updates > 0)

    def interrupted(self) -> bool:
        return int(self.shared["order"][0]) == INTERRUPTED

    def start(self) -> None:
        self._send("started", None)
        self._meet()  # time counts from when all are ready
        self._started = self._saved_at = time.perf_counter()
        self._cpu_started = time.process_time()

    def record(self, steps: int, episodes: Sequence[Episode], losses: dict[str, float]) -> None:
        table = self.shared["episodes"][self.rank]
        table[0, 0] = len(episodes)
        if episodes:
            table[1 : len(episodes) + 1] = torch.tensor(episodes, dtype=table.dtype)
        elapsed, cpu = time.perf_counter() - self._started, time.process_time() - self._cpu_started
        mine = [float(steps), elapsed, cpu, *(self.clock.seconds[name] for name in PHASES)]
        total_steps, elapsed, cpu, *seconds = self.reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        workers, before = self.num_workers, self._seconds_before
        self.steps += int(total_steps)
        self.updates += 1
        self._elapsed = self._elapsed_before + elapsed / workers
        everyones = self.finished_episodes() if self.rank == 0 else None
        if self.reports and everyones is not None:
            self._send(
                "record",
                {
                    "steps": int(total_steps),
                    "episodes": [tuple(row) for row in in_order(everyones).tolist()],
                    "losses": losses,
                    "at": self._elapsed,
                    "phase_seconds": {n: before[n] + s / workers for n, s in zip(PHASES, seconds, strict=True)},
                    "cpu_seconds": cpu,
                },
            )

    def finished_episodes(self) -> torch.Tensor | None:
        """Return a row for each that ended in this rollout, with the fields of Episode."""
        return torch.cat([table[1 : int(table[0, 0]) + 1] for table in self.shared["episodes"]])

    def checkpoint_due(self) -> bool:
        minutes = (time.perf_counter() - self._saved_at) / 60
        every = self.updates % self.config.training.save_interval == 0
        return self.reports and (every or minutes > self.config.logging.checkpoint_minutes)

    def save(self, state: dict[str, Any]) -> None:
        self._send("save", checkpoint.pack(state))
        self._saved_at = time.perf_counter()

    def finish(self, state: dict[str, Any]) -> None:
        if self.reports:
            self._send("final state", checkpoint.pack(state))

    def _send(self, kind: str, content: Any) -> None:
        self.connection.send(("message", (kind, content)))

    def _meet(self) -> None:
        self.reduce(torch.zeros(1, dtype=torch.float64))
        self.clock.seconds = dict.fromkeys(PHASES, 0.0)


def sums(config: Config, task: Task) -> tuple[int, int]:
    """How much is summed at once: floats for the gradient and the loss statistics, doubles for anything else."""
    minibatches = config.training.n_epochs * -(-config.rollout_size // config.batch_size)
    return task.num_parameters + VECTOR_SPARE, 3 * minibatches + SMALL_SPARE
