"""A3C on several machines: on each the workers of hogwild.py, who wait for nobody, and parameters of its own.

The node processes exchange parameters now and then: each adds to its own what the mean of all was ahead of them. The
workers go on meanwhile, and what they learn in that time is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.hogwild import hogwild
from rl_cluster_benchmark.execution.machines.follower import Follower
from rl_cluster_benchmark.execution.machines.machine_averaging import EXCHANGES, MachineAveraging, exchanges_before
from rl_cluster_benchmark.execution.machines.machine_links import MachineSeat
from rl_cluster_benchmark.execution.machines.machine_supervisor import MachineSupervisor
from rl_cluster_benchmark.execution.reports import order_of
from rl_cluster_benchmark.execution.task import deal
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run


def train(run: Run, cluster: Cluster) -> None:
    """On the head: run this machine's workers, and write down what those of all machines report."""
    here = HogwildMachine(cluster, run.config, run.plan)
    tables: dict[int, Tensor] = {0: here.shared["times"]}  # of each machine
    seconds_before, before = dict(run.clock.seconds), exchanges_before(run)
    together: list[dict[str, Any]] = []
    final_state: dict[str, Any] | None = None

    def record() -> None:
        """As many updates as there are workers on all machines count as one."""
        everyone = torch.cat(list(tables.values()))
        run.clock.seconds = process_times.mean_phases(everyone, seconds_before)
        run.worker_cpu_seconds = process_times.cpu_seconds(everyone)
        report = hogwild.merged(together)
        together.clear()
        report["asynchrony"][EXCHANGES] = float(before + here.council.exchanges)
        run.record(**report)

    def hear(node: int, kind: str, content: Any) -> None:
        nonlocal final_state
        if kind == "record":
            together.append(content)
            if len(together) == cluster.num_workers:
                record()
        elif kind == "times":
            tables[node] = torch.tensor(content, dtype=torch.float64)
        elif kind == "save":
            if together:
                record()  # the parameters have learned from these steps: the checkpoint counts them
            run.save(checkpoint.unpack(content))
        elif kind == "final state":
            final_state = checkpoint.unpack(content)

    try:
        here.train(run.resumed_path, run.progress_state(), look=lambda: order_of(run), start=run.start, hear=hear)
    finally:  # also of a run that fails every step counts
        if together:
            record()
    assert final_state is not None
    run.finish(final_state)


def follow(cluster: Cluster, config: Config, plan: Plan, checkpoint: Path | None, progress: dict[str, Any]) -> None:
    """On every other machine."""
    HogwildMachine(cluster, config, plan).train(checkpoint, progress, look=Follower(cluster))


class HogwildMachine:
    """One machine's part of the run."""

    council: MachineAveraging
    busy = False  # whatever is added to the parameters is in them at once

    def __init__(self, cluster: Cluster, config: Config, plan: Plan) -> None:
        self.cluster, self.config, self.plan = cluster, config, plan
        self.shared = SharedTensors(hogwild.layout(config, plan.num_workers))

    def train(
        self, checkpoint: Path | None, progress: dict[str, Any], *, look: Callable[[], int],
        start: Callable[[], None] = lambda: None, hear: Callable[[int, str, Any], None] = lambda *report: None,
    ) -> None:  # fmt: skip
        """On the head, `hear` gets what the workers of all machines report: (machine, kind, content)."""
        config, plan, seat = self.config, self.plan, MachineSeat.of(self.cluster, self.config)
        council = self.council = MachineAveraging(
            seat,
            counts=self.counts,
            exchange=self,
            updates_between=config.cluster.sync_every * seat.total_workers,
            hear=hear,
        )
        machine = MachineSupervisor(
            self.cluster, config, council, self.shared, progress["steps"],
            look=look, start=start, times=self.shared["times"].tolist,
        )  # fmt: skip
        shards = seat.own(deal(config.env.num_envs, seat.total_workers), plan.num_workers)
        args = (config, plan, shards, self.shared, checkpoint, progress, self.cluster.is_head, seat.total_workers)
        with WorkerPool(hogwild.work, plan.num_workers, args, plan.cores, watchdog=limit_of(config)) as pool:
            machine.run(pool, hear)

    def counts(self) -> list[float]:
        counters, returns = self.shared["counters"].sum(0), self.shared["returns"].sum(0)
        return [float(counters[hogwild.STEPS]), float(counters[hogwild.UPDATES]), *returns[:3].tolist()]

    def snapshot(self) -> Tensor:
        return self.shared["parameters"].clone()

    def add(self, correction: Tensor) -> None:
        self.shared["parameters"].add_(correction)
