"""A worker of A3C, and what all workers of a machine share.

Of what two workers add to one parameter at the same moment, one part may be lost, as in the paper. Counters and returns
have one writer each, and lose nothing. The end relies on the order of stores: everything else before DONE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock, beat
from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.execution.machines import machine_averaging, machine_supervisor
from rl_cluster_benchmark.execution.machines.machine_links import MachineShare
from rl_cluster_benchmark.execution.messages import (
    FinalState,
    NothingLeftToDo,
    Orders,
    Started,
    StateToSave,
    UpdateMade,
)
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.experience.rollout import Episode
from rl_cluster_benchmark.learning.learner import OPTIMIZERS, Alone
from rl_cluster_benchmark.learning.reduction import OptimizerMemory
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, MemoryLayout, SharedTensors
from rl_cluster_benchmark.processes.waiting import wait_until
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.course import Goal, SaveTimer

NAP_SECONDS = 0.001
MOMENT = "moment_"  # before the names of the optimiser's moments
STEPS, UPDATES, DONE = range(3)  # columns of the counters


def layout(config: Config, num_workers: int) -> MemoryLayout:
    """Return what the workers of a machine share."""
    size = Task.of(config).num_parameters
    moments = OPTIMIZERS[config.training.optimizer].MOMENTS
    return {
        **machine_supervisor.layout(),
        "parameters": ((size,), torch.float32),
        "optimizer_steps": ((1,), torch.float32),
        **{MOMENT + name: ((size,), torch.float32) for name in moments},
        "counters": ((num_workers, CACHE_LINE), torch.int64),
        "returns": ((num_workers, CACHE_LINE), torch.float64),
        **process_times.layout(num_workers),
    }


def work(
    rank: int, connection: Connection, share: MachineShare, shards: list[list[int]], shared: SharedTensors
) -> None:  # fmt: skip
    """Run a worker, in its process: A2C's loop with the parameters behind its learner shared."""
    config, plan, seat, progress = share.config, share.plan, share.seat, share.progress
    process.prepare_process(plan.num_threads)
    saves = rank == 0 and seat.node_rank == 0
    course = HogwildCourse(rank, connection, config, shared, progress, saves=saves, total_workers=seat.total_workers)
    reduce = WithoutWaiting(shared, rank)
    worker = Worker.build(
        config, plan, env_ids=shards[rank], reduce=reduce, clock=course.clock, incarnation=course.updates,
        checkpoint=share.checkpoint(),
    )  # fmt: skip
    flat = worker.algorithm.learner.flat
    if rank == 0:
        shared["parameters"].copy_(flat)

    def fetch() -> None:
        with course.clock.phase("communication"):
            course.version = course.count(UPDATES)
            flat.copy_(shared["parameters"])
            worker.model.weights_changed()

    connection.send(Started(f"Worker {rank} started with {len(shards[rank])} environments"))
    learn(worker, course, reduce, fetch)


class WithoutWaiting(Alone):
    """How a worker of A3C learns with others: sums are its own, the optimiser works on what all of them share."""

    def __init__(self, shared: SharedTensors, rank: int) -> None:
        self._shared = shared
        elsewhere = shared["elsewhere"][machine_averaging.MOMENTS]
        self._returns = SumSinceLastTime(shared["returns"], rank, elsewhere)

    def running_sum(self, tensor: Tensor) -> Tensor:
        return self._returns(tensor)

    def optimizer_memory(self) -> OptimizerMemory:
        names = [name for name in self._shared if name.startswith(MOMENT)]
        moments = {name.removeprefix(MOMENT): self._shared[name] for name in names}
        return OptimizerMemory(self._shared["parameters"], moments, self._shared["optimizer_steps"][0])


class SumSinceLastTime:
    """A sum that nobody waits for: what this worker adds, and what the others have added since it last asked.

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
        self.rank, self.connection, self.shared, self.saves = rank, connection, shared, saves
        self._goal, self._save_timer, self._orders = Goal(config.training), SaveTimer(config), Orders(shared["order"])
        self.clock = PhaseClock()
        self.time = process_times.TimeKeeper(shared["times"][rank], self.clock)
        self._updates_before = progress["updates"]  # of the run, when it was resumed
        # Of this worker: more than it can have made before, however far ahead: no random number comes twice.
        self.updates = progress["updates"] * total_workers
        self.version = 0
        self._steps_before, self._elapsed_before = progress["steps"], progress["elapsed"]

    def count(self, column: int) -> int:
        """Return a counter's sum over this machine's workers, since the start of this process."""
        return int(self.shared["counters"][:, column].sum())

    @property
    def fraction(self) -> float:
        return self._goal.fraction(self._steps, self._elapsed)

    @property
    def _elapsed(self) -> float:
        """Return the seconds of training, those before a resume included."""
        return self._elapsed_before + self.time.elapsed

    @property
    def _steps(self) -> int:
        """Return the steps of all machines, those of others as far as they are known here."""
        return self._steps_before + self.count(STEPS) + int(self.shared["elsewhere"][machine_averaging.STEPS])

    def is_complete(self) -> bool:
        return self._goal.is_reached(self._steps)

    def should_stop(self) -> bool:
        return self._orders.should_stop(self._updates_before + self.count(UPDATES))

    def interrupted(self) -> bool:
        return self._orders.interrupted()

    def start(self) -> None:
        """Wait until the workers of all machines are ready: time counts from then on."""
        wait_until(lambda: bool(self.shared["go"][0]) or self.should_stop(), self.clock)
        self.time.start()
        self._save_timer.restart()

    def record(self, steps: int, episodes: Sequence[Episode], losses: dict[str, float]) -> None:
        mine = self.shared["counters"][self.rank]
        lag = self.count(UPDATES) - self.version  # updates by others while this one was made
        mine[STEPS] += steps
        mine[UPDATES] += 1
        self.updates += 1
        self.time.write()
        asynchrony = {"async/policy_lag": float(lag), "async/policy_lag_max": float(lag)}
        self.connection.send(UpdateMade(steps, losses, self._elapsed, list(episodes), asynchrony))

    def checkpoint_due(self) -> bool:
        return self.saves and self._save_timer.is_due(self.updates)

    def save(self, state: dict[str, Any]) -> None:
        self.connection.send(StateToSave(checkpoint.pack(state)))
        self._save_timer.restart()

    def finish(self, state: Callable[[], dict[str, Any]]) -> None:
        """Wait until nobody changes the parameters any more, then report them, if this worker does that for all."""
        counters = self.shared["counters"]
        counters[self.rank, DONE] = 1
        wait_until(lambda: self.count(DONE) == len(counters), self.clock)
        if self.rank == 0:
            self.connection.send(NothingLeftToDo())
            while not int(self.shared["closed"][0]):
                beat(is_waiting=True)  # for other machines, as long as they are there
                time.sleep(NAP_SECONDS)
        if self.saves:
            self.connection.send(FinalState(checkpoint.pack(state())))
