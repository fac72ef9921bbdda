"""A3C (Mnih et al., 2016): workers that update shared parameters without locks and without waiting for each other.

Each worker copies the parameters, collects a rollout with the copy, and lets the optimiser step with its own gradient
on what the parameters are by then. Parameters and the optimiser's statistics lie in shared memory. With one worker this
is A2C, number for number.
Each of several machines has parameters of its own. Their node processes exchange them now and then: each adds to its
own what the mean of all was ahead of them. The workers go on meanwhile, and what they learn in that time is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.execution.hogwild import hogwild_worker
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_averaging import EXCHANGES, averaging_of, exchanges_before
from rl_cluster_benchmark.execution.machines.machine_links import MachineShare
from rl_cluster_benchmark.execution.machines.machine_supervisor import MachineSupervisor
from rl_cluster_benchmark.execution.messages import EpisodesEnded, ProcessTimes, Report, UpdateMade, merged
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run.run import Run


class HogwildMachine:
    """One machine's workers and parameters; see training/executions.py for what is asked of it."""

    busy = False  # whatever is added to the parameters is in them at once

    def __init__(self, cluster: Cluster | MachineAlone, share: MachineShare) -> None:
        self.cluster, self.share, self.seat = cluster, share, share.seat
        self.shared = SharedTensors(hogwild_worker.layout(share.config, share.plan.num_workers))
        self.exchanges = 0  # of parameters, with other machines

    def updates(self, run: Run) -> CombinedUpdates:
        return CombinedUpdates(run, self)

    def train(self, *, look: Callable[[], int], start: Callable[[], None], hear: Callable[[int, Report], None]) -> None:
        config, plan, seat = self.share.config, self.share.plan, self.seat
        between = config.cluster.sync_every * seat.total_workers
        averaging = averaging_of(seat, counts=self.counts, exchange=self, updates_between=between, hear=hear)
        machine = MachineSupervisor(
            self.cluster, config, averaging, self.shared, self.share.progress["steps"],
            look=look, start=start, times=lambda: ProcessTimes(self.shared["times"].tolist()),
        )  # fmt: skip
        args = (self.share, self.share.shards(), self.shared)
        with WorkerPool(hogwild_worker.work, plan.num_workers, args, plan.cores, watchdog=limit_of(config)) as pool:
            machine.run(pool, hear)

    def counts(self) -> list[float]:
        counters, returns = self.shared["counters"].sum(0), self.shared["returns"].sum(0)
        return [
            float(counters[hogwild_worker.STEPS]), float(counters[hogwild_worker.UPDATES]), *returns[:3].tolist()
        ]  # fmt: skip

    def snapshot(self) -> Tensor:
        return self.shared["parameters"].clone()

    def add(self, correction: Tensor) -> None:
        self.shared["parameters"].add_(correction)
        self.exchanges += 1


class CombinedUpdates:
    """Updates of all workers of all machines, each made by one of them alone.

    As many updates as there are workers count as one of the run: as much experience as an update of A2C.
    """

    def __init__(self, run: Run, here: HogwildMachine) -> None:
        self._run, self._here = run, here
        self._tables: dict[int, Tensor] = {0: here.shared["times"]}  # of each machine
        self._seconds_before, self._exchanges_before = dict(run.clock.seconds), exchanges_before(run)
        self._together: list[UpdateMade] = []

    def hear(self, node: int, report: UpdateMade | EpisodesEnded | ProcessTimes) -> None:
        match report:
            case UpdateMade():
                self._together.append(report)
                if len(self._together) == self._here.seat.total_workers:
                    self.complete()
            case ProcessTimes(rows):
                self._tables[node] = torch.tensor(rows, dtype=torch.float64)
            case EpisodesEnded():
                raise AssertionError("workers tell of episodes with their updates")

    def complete(self) -> None:
        """Make an update of the run of whatever has been heard since the last one."""
        if not self._together:
            return
        everyone = torch.cat(list(self._tables.values()))
        self._run.clock.seconds = process_times.mean_phases(everyone, self._seconds_before)
        self._run.worker_cpu_seconds = process_times.cpu_seconds(everyone)
        update = merged(self._together)
        self._together.clear()
        if self._here.seat.num_nodes > 1:
            update.asynchrony[EXCHANGES] = float(self._exchanges_before + self._here.exchanges)
        self._run.record(update.steps, update.episodes, update.losses, update.asynchrony, update.at)
