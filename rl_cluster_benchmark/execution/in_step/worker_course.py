"""How far a run of PPO or A2C is: what each worker knows of it, and what the parent makes of their reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.config.schema import MAX_ENVS, Config
from rl_cluster_benchmark.core.timing import PHASES, PhaseClock
from rl_cluster_benchmark.execution.in_step.local_steps import LocalSteps
from rl_cluster_benchmark.execution.machines.machine_links import MachineLinks, MachineSeat
from rl_cluster_benchmark.execution.messages import (
    AllStarted,
    EpisodesEnded,
    FinalState,
    MeanTimes,
    Orders,
    ProcessTimes,
    SignalElsewhere,
    StateToSave,
    UpdateMade,
)
from rl_cluster_benchmark.experience.rollout import Episode
from rl_cluster_benchmark.learning.reduction import Reducer
from rl_cluster_benchmark.processes.shared_memory import MemoryLayout, SharedTensors
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.course import Goal, SaveTimer
from rl_cluster_benchmark.run.run import Run

ORDER, SIGNAL = 0, 1  # places in what the parent tells its workers


def layout(num_workers: int, longest: int) -> MemoryLayout:
    """Return what a machine's workers share: orders, and a table for each of up to `longest` finished episodes.

    The first row of a table says how many episodes there are.
    """
    return {
        "order": ((2,), torch.int64),
        "episodes": ((num_workers, longest + 1, len(Episode._fields)), torch.float64),
    }


def in_order(rows: Tensor) -> Tensor:
    """Sort episodes by when they ended, those of one moment by their environments: whoever played, it is the same."""
    slots, env_ids = rows[:, 2].long(), rows[:, 3].long()
    return rows[torch.argsort(slots * MAX_ENVS + env_ids)]


class CommonUpdates:
    """What the parent makes of the workers' reports: each update of all workers of all machines is one of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def hear(self, node: int, report: UpdateMade | EpisodesEnded | ProcessTimes) -> None:
        assert isinstance(report, UpdateMade)
        assert report.times is not None
        self._run.clock.seconds, self._run.worker_cpu_seconds = report.times.phase_seconds, report.times.cpu_seconds
        self._run.record(report.steps, report.episodes, report.losses, at=report.at)

    def complete(self) -> None:
        """Do nothing: each report was an update."""


class WorkerCourse:
    """A worker's view of the run. All workers hold the same counters; the head's first one reports to the parent."""

    def __init__(
        self, rank: int, seat: MachineSeat, connection: Connection, config: Config, shared: SharedTensors,
        progress: dict[str, Any], *, clock: PhaseClock, reduce: Reducer, links: MachineLinks | None = None,
        local_steps: LocalSteps | None = None,
    ) -> None:  # fmt: skip
        """`reduce` sums over all machines; `links` are the first worker's to other machines, if there are any.

        `local_steps` is there when machines step by themselves.
        """
        self.rank, self.seat, self.connection, self.shared = rank, seat, connection, shared
        self._goal, self._save_timer, self._orders = Goal(config.training), SaveTimer(config), Orders(shared["order"])
        self.clock, self.reduce, self._links, self._local = clock, reduce, links, local_steps
        self.reports = rank == 0 and seat.node_rank == 0
        self.steps, self.updates = progress["steps"], progress["updates"]
        self._elapsed, self._seconds_before = progress["elapsed"], progress["phase_seconds"]
        self._elapsed_before = self._elapsed
        self._save_is_due = False

    @property
    def fraction(self) -> float:
        """Return how much of the run is done as of the last update; it is the same on all workers."""
        return self._goal.fraction(self.steps, self._elapsed)

    def is_complete(self) -> bool:
        return self._goal.is_reached(self.steps)

    def should_stop(self) -> bool:
        return self._orders.should_stop(self.updates)

    def interrupted(self) -> bool:
        return self._orders.interrupted()

    def start(self) -> None:
        """Wait for the workers of all machines: time counts from when all are ready, and nothing is written before."""
        self.reduce(torch.zeros(1, dtype=torch.float64))
        if self.rank == 0:
            self.connection.send(AllStarted())
        self.clock.seconds = dict.fromkeys(PHASES, 0.0)
        self._save_timer.restart()
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def record(self, steps: int, episodes: Sequence[Episode], losses: dict[str, float]) -> None:
        """Count an update on all workers of all machines; the one that reports tells the parent."""
        if self._local is not None:
            losses = self._local.of_all_machines(losses)
        table = self.shared["episodes"][self.rank]
        table[0, 0] = len(episodes)
        if episodes:
            table[1 : len(episodes) + 1] = torch.tensor(episodes, dtype=table.dtype)
        elapsed, cpu = time.perf_counter() - self._started, time.process_time() - self._cpu_started
        mine = [float(steps), elapsed, cpu, *(self.clock.seconds[name] for name in PHASES)]
        total_steps, elapsed, cpu, *seconds = self.reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        workers, before = self.seat.total_workers, self._seconds_before
        self.steps += int(total_steps)
        self.updates += 1
        self._elapsed = self._elapsed_before + elapsed / workers
        everyones = self._finished_episodes() if self.rank == 0 else None
        if self.reports and everyones is not None:
            phase_seconds = {n: before[n] + s / workers for n, s in zip(PHASES, seconds, strict=True)}
            self.connection.send(
                UpdateMade(
                    steps=int(total_steps),
                    losses=losses,
                    at=self._elapsed,
                    episodes=[tuple(row) for row in in_order(everyones).tolist()],
                    times=MeanTimes(phase_seconds, cpu),
                )
            )
        if self._local is not None:
            self._local.update_done(self.updates)

    def _finished_episodes(self) -> Tensor | None:
        """Return a row for each that ended in this rollout, with the fields of Episode; None where no head is."""
        here = torch.cat([table[1 : int(table[0, 0]) + 1] for table in self.shared["episodes"]])
        return self._links.gather(here) if self._links is not None else here

    def checkpoint_due(self) -> bool:
        """Return whether to save now; machines that step by themselves wait until they have averaged."""
        self._save_is_due |= self.reports and self._save_timer.is_due(self.updates)
        due = self._save_is_due and (self._local is None or self._local.is_averaged(self.updates))
        self._save_is_due &= not due
        return due

    def save(self, state: dict[str, Any]) -> None:
        self.connection.send(StateToSave(checkpoint.pack(state)))
        self._save_timer.restart()

    def finish(self, state: Callable[[], dict[str, Any]]) -> None:
        if self.seat.num_nodes > 1:
            self._agree_on_signal()
        if self._local is not None and not self._local.is_averaged(self.updates):
            self._local.average(self.updates)
        if self.reports:
            self.connection.send(FinalState(checkpoint.pack(state())))

    def _agree_on_signal(self) -> None:
        """Tell the parents of all machines of a signal that one of them has received: all end with its status."""
        signals = torch.zeros(self.seat.num_nodes, dtype=torch.float64)
        if self.rank == 0:
            signals[self.seat.node_rank] = float(self.shared["order"][SIGNAL])
        self.reduce(signals)
        if self.rank == 0 and signals.any():
            node = int(signals.argmax())
            self.connection.send(SignalElsewhere(node, int(signals[node])))
