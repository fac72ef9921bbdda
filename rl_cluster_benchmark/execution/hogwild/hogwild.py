"""A3C (Mnih et al., 2016): workers that update shared parameters without locks and without waiting for each other.

Each worker copies the parameters, collects a rollout with the copy, and lets the optimiser step with its own gradient
on what the parameters are by then. Parameters and the optimiser's statistics lie in shared memory. With one worker this
is A2C, number for number.
Of what two workers add to one parameter at the same moment, one part may be lost, as in the paper. Counters and returns
have one writer each, and lose nothing. The end relies on the order of stores: everything else before DONE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.a2c import A2C
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock, beat
from rl_cluster_benchmark.execution.loop import Worker, update
from rl_cluster_benchmark.execution.machines import machine_averaging, machine_supervisor
from rl_cluster_benchmark.execution.reports import INTERRUPTED, TIME_IS_UP, reports
from rl_cluster_benchmark.execution.task import Task, deal
from rl_cluster_benchmark.experience.rollout import Episode
from rl_cluster_benchmark.learning import bad_numbers
from rl_cluster_benchmark.learning.bad_numbers import mean_of
from rl_cluster_benchmark.learning.learner import Learner
from rl_cluster_benchmark.learning.optimizers import OPTIMIZERS
from rl_cluster_benchmark.learning.reduction import Alone
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors
from rl_cluster_benchmark.processes.waiting import wait_until
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run

NAP_SECONDS = 0.001
STEPS, UPDATES, DONE = range(3)  # columns of the counters


def train(run: Run) -> None:
    """In the parent: start the workers, write down what they report, tell them when to stop."""
    config, plan, num_workers = run.config, run.plan, run.plan.num_workers
    shards = deal(config.env.num_envs, num_workers)
    shared = SharedTensors(layout(config, num_workers))
    args = (config, plan, shards, shared, run.resumed_path, run.progress_state())
    seconds_before = dict(run.clock.seconds)
    together: list[dict[str, Any]] = []
    final_state = None

    def record() -> None:
        """As many updates as there are workers count as one: as much experience as an update of A2C."""
        run.clock.seconds = process_times.mean_phases(shared["times"], seconds_before)
        run.worker_cpu_seconds = process_times.cpu_seconds(shared["times"])
        report = merged(together)
        together.clear()
        run.record(**report)

    shared["closed"].fill_(1)  # no other machine is waited for at the end
    with WorkerPool(work, num_workers, args, plan.cores, watchdog=limit_of(config)) as pool:
        try:
            for kind, content in reports(run, pool, shards, shared["order"], when_ready=lambda: shared["go"].fill_(1)):
                if kind == "record":
                    together.append(content)
                    if len(together) == num_workers:
                        record()
                elif kind == "save":
                    if together:
                        record()  # the parameters have learned from these steps: the checkpoint counts them
                    run.save(checkpoint.unpack(content))
                elif kind == "final state":
                    final_state = checkpoint.unpack(content)
        finally:  # also of a run that fails every step counts
            if together:
                record()
        assert final_state is not None
        run.finish(final_state)


def layout(config: Config, num_workers: int) -> process_times.MemoryLayout:
    size = Task.of(config).num_parameters
    moments = OPTIMIZERS[config.training.optimizer].MOMENTS
    return {
        **machine_supervisor.layout(),
        "parameters": ((size,), torch.float32),
        "optimizer_steps": ((1,), torch.float32),
        **{f"moment_{name}": ((size,), torch.float32) for name in moments},
        "counters": ((num_workers, CACHE_LINE), torch.int64),
        "returns": ((num_workers, CACHE_LINE), torch.float64),
        **process_times.layout(num_workers),
    }


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Updates of several workers as one."""
    lags = [report["lag"] for report in reports]
    return {
        "steps": sum(report["steps"] for report in reports),
        "episodes": [episode for report in reports for episode in report["episodes"]],
        "losses": mean_of([report["losses"] for report in reports]),
        "asynchrony": {"async/policy_lag": sum(lags) / len(lags), "async/policy_lag_max": float(max(lags))},
        "at": max(report["at"] for report in reports),
    }


def work(
    rank: int, connection: Connection, config: Config, plan: Plan, shards: list[list[int]], shared: SharedTensors,
    resumed_path: Path | None, progress: dict[str, Any], saves: bool = True, total_workers: int | None = None,
) -> None:  # fmt: skip
    """In a worker: the loop of every worker, with the parameters behind its learner shared.

    `total_workers` is the number of workers on all machines, if there are several.
    """
    process.prepare_process(plan.num_threads)
    total_workers = total_workers or len(shards)
    course = HogwildCourse(
        rank, connection, config, shared, progress, saves=saves and rank == 0, total_workers=total_workers
    )
    state = checkpoint.load(resumed_path) if resumed_path else None
    worker = Worker.build(
        config, plan, env_ids=shards[rank], reduce=Alone(), clock=course.clock, incarnation=course.updates,
        checkpoint=state,
    )  # fmt: skip
    assert isinstance(worker.algorithm, A2C)
    on_policy = worker.algorithm.on_policy
    share(on_policy.learner, shared, fill=rank == 0)
    on_policy.normalize_rewards.reduce = SumSinceLastTime(
        shared["returns"], rank, shared["elsewhere"][machine_averaging.MOMENTS]
    )

    def fetch() -> None:
        with course.clock.phase("communication"):
            course.version = course.count(UPDATES)
            on_policy.learner.flat.copy_(shared["parameters"])
            worker.model.weights_changed()

    _learn(worker, course, fetch)


def _learn(worker: Worker, course: HogwildCourse, fetch: Callable[[], None]) -> None:
    course.start()
    while not course.is_complete():
        fetch()
        rollout = worker.collector.collect(course.updates, course.should_stop)
        if rollout is None:
            break
        losses = update(worker, rollout, course, bad_numbers.count(rollout))
        course.record(rollout.num_steps, rollout.episodes, losses)
        if course.checkpoint_due():
            fetch()
            course.save(worker.state())
    course.wait_for_all()
    fetch()
    course.finish(worker.state())


def share(learner: Learner, shared: SharedTensors, *, fill: bool) -> None:
    """Let the learner's optimiser work on the shared parameters and statistics; one worker fills them first."""
    optimizer = learner.optimizer
    if fill:
        shared["parameters"].copy_(learner.flat)
        shared["optimizer_steps"].fill_(float(optimizer.steps))
        for name, tensor in optimizer.moments.items():
            shared[f"moment_{name}"].copy_(tensor)
    optimizer.parameters = shared["parameters"]
    optimizer.steps = shared["optimizer_steps"][0]
    optimizer.moments = {name: shared[f"moment_{name}"] for name in optimizer.moments}


class SumSinceLastTime:
    """What this worker adds, and what the others have added since it last asked: a sum that nobody waits for.

    `elsewhere` is what workers of other machines have added.
    """

    def __init__(self, table: Tensor, rank: int, elsewhere: Tensor) -> None:
        self._table, self._rank, self._elsewhere = table, rank, elsewhere
        self._seen: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        size = tensor.numel()
        self._table[self._rank, :size] += tensor
        everyone = self._table[:, :size].clone()
        everyone[self._rank] = 0.0
        others = everyone.sum(0) + self._elsewhere[:size]
        news = others if self._seen is None else others - self._seen
        self._seen = others
        return tensor + news


class HogwildCourse:
    """A worker's view of the run: its own updates, and everybody's steps."""

    def __init__(
        self, rank: int, connection: Connection, config: Config, shared: SharedTensors, progress: dict[str, Any], *,
        saves: bool, total_workers: int,
    ) -> None:  # fmt: skip
        self.rank, self.connection, self.config, self.shared, self.saves = rank, connection, config, shared, saves
        self.clock = PhaseClock()
        self.time = process_times.TimeKeeper(shared["times"][rank], self.clock)
        self._updates_before = progress["updates"]  # of the run, when it was resumed
        # Of this worker: more than it can have made before, however far ahead: no random number comes twice.
        self.updates = progress["updates"] * total_workers
        self.version = 0
        self._steps_before, self._elapsed_before = progress["steps"], progress["elapsed"]

    def count(self, column: int) -> int:
        """Over all workers, since the start of this process."""
        return int(self.shared["counters"][:, column].sum())

    @property
    def fraction(self) -> float:
        training = self.config.training
        by_time = self._elapsed / (training.duration_hours * 3600) if training.duration_hours else 0.0
        return min(1.0, max(self._steps / training.total_timesteps, by_time))

    @property
    def _elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._elapsed_before + self.time.elapsed

    @property
    def _steps(self) -> int:
        """Of all machines, those of others as far as they are known here."""
        return self._steps_before + self.count(STEPS) + int(self.shared["elsewhere"][machine_averaging.STEPS])

    def is_complete(self) -> bool:
        return self._steps >= self.config.training.total_timesteps

    def should_stop(self) -> bool:
        order = int(self.shared["order"][0])
        return order == INTERRUPTED or (order == TIME_IS_UP and self._updates_before + self.count(UPDATES) > 0)

    def interrupted(self) -> bool:
        return int(self.shared["order"][0]) == INTERRUPTED

    def start(self) -> None:
        self._send("started", None)
        wait_until(lambda: bool(self.shared["go"][0]) or self.should_stop(), self.clock)
        self.time.start()
        self._saved_at = time.perf_counter()

    def record(self, steps: int, episodes: Sequence[Episode], losses: dict[str, float]) -> None:
        mine = self.shared["counters"][self.rank]
        lag = self.count(UPDATES) - self.version  # updates by others while this one was made
        mine[STEPS] += steps
        mine[UPDATES] += 1
        self.updates += 1
        self.time.write()
        report = {"steps": steps, "episodes": list(episodes), "losses": losses, "lag": lag, "at": self._elapsed}
        self._send("record", report)

    def checkpoint_due(self) -> bool:
        minutes = (time.perf_counter() - self._saved_at) / 60
        every = self.updates % self.config.training.save_interval == 0
        return self.saves and (every or minutes > self.config.logging.checkpoint_minutes)

    def save(self, state: dict[str, Any]) -> None:
        self._send("save", checkpoint.pack(state))
        self._saved_at = time.perf_counter()

    def wait_for_all(self) -> None:
        """Nobody changes the parameters any more."""
        counters = self.shared["counters"]
        counters[self.rank, DONE] = 1
        wait_until(lambda: self.count(DONE) == len(counters), self.clock)
        if self.rank == 0:
            self._send("done", None)
            while not int(self.shared["closed"][0]):
                beat(is_waiting=True)  # for other machines, as long as they are there
                time.sleep(NAP_SECONDS)

    def finish(self, state: dict[str, Any]) -> None:
        if self.saves:
            self._send("final state", checkpoint.pack(state))

    def _send(self, kind: str, content: Any) -> None:
        self.connection.send(("message", (kind, content)))
