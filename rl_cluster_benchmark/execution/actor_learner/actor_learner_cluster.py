"""IMPALA on several machines: on each the actors and learners of actor_learner.py.

With `allreduce` the first learners of all machines take every step together: they agree on it, and sum their machines'
gradients. With `async` each machine takes its own steps, and its parameters are corrected now and then towards the mean
of all. In both, the node processes tell the head of episodes and times without waiting for each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.actor_learner import actor_learner
from rl_cluster_benchmark.execution.actor_learner.actor_learner import Replacements, UpdateRecorder
from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.machines.follower import Follower
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_averaging import (
    EXCHANGES,
    NUM_COUNTS,
    MachineAveraging,
    exchanges_before,
)
from rl_cluster_benchmark.execution.machines.machine_links import MachineSeat
from rl_cluster_benchmark.execution.machines.machine_supervisor import MachineSupervisor
from rl_cluster_benchmark.execution.reports import order_of
from rl_cluster_benchmark.learning.bad_numbers import mean_of
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run


def train(run: Run, cluster: Cluster | MachineAlone) -> None:
    """On the head: run this machine's actors and learners, and write down what those of all machines report."""
    assert isinstance(cluster, Cluster)
    here = ActorLearnerMachine(
        cluster, run.config, run.plan, run.directory.root, run.resumed_path, run.progress_state()
    )
    records = Records(run, here)
    try:
        here.train(look=lambda: order_of(run), start=run.start, hear=records.hear)
    finally:  # also of a run that fails every step counts
        records.record_the_rest()
    records.finish()


def follow(cluster: Cluster, config: Config, plan: Plan, checkpoint: Path | None, progress: dict[str, Any]) -> None:
    """On every other machine. A replay, if there is one, is this machine's own and lies on its own disk."""
    folder = Path(tempfile.gettempdir())
    ActorLearnerMachine(cluster, config, plan, folder, checkpoint, progress).train(look=Follower(cluster))


class ActorLearnerMachine:
    """One machine's part of the run."""

    council: MachineAveraging

    def __init__(
        self, cluster: Cluster, config: Config, plan: Plan, folder: Path, checkpoint: Path | None,
        progress: dict[str, Any],
    ) -> None:  # fmt: skip
        self.cluster, self.config, self.plan, self.progress = cluster, config, plan, progress
        self.shared = Shared(config, plan, folder, checkpoint, MachineSeat.of(cluster, config))
        self.replace = Replacements(self.shared, progress)

    def train(
        self, *, look: Callable[[], int], start: Callable[[], None] = lambda: None,
        hear: Callable[[int, str, Any], None] = lambda *report: None,
    ) -> None:  # fmt: skip
        """On the head, `hear` gets what the processes of all machines report: (machine, kind, content)."""
        shared, plan = self.shared, self.plan
        assert shared.seat is not None
        council = self.council = MachineAveraging(
            shared.seat,
            counts=self.counts,
            exchange=PublishedParameters(shared) if shared.is_on_its_own else None,
            updates_between=self.config.cluster.sync_every * shared.seat.num_nodes,
            hear=hear,
        )
        machine = MachineSupervisor(
            self.cluster, self.config, council, shared.flags, self.progress["steps"],
            look=look, start=start, times=self.times,
        )  # fmt: skip
        args, num_processes = (shared, self.progress, 0), plan.num_learners + plan.num_workers
        limit = limit_of(self.config)
        with WorkerPool(actor_learner.work, num_processes, args, plan.cores, self.replace, limit) as pool:
            machine.run(pool, hear)

    def counts(self) -> list[float]:
        """Machines that take their steps together know each other's."""
        return self.shared.flags["here"].tolist() if self.shared.is_on_its_own else [0.0] * NUM_COUNTS

    def times(self) -> dict[str, Any]:
        rows, learners = self.shared.flags["times"].tolist(), self.plan.num_learners
        return {"learners": rows[:learners], "actors": rows[learners:], "restarts": self.replace.count}


class PublishedParameters:
    """A machine's learners as its node process sees them: weights that they publish, and a place for corrections."""

    def __init__(self, shared: Shared) -> None:
        self._flags, self._weights, self._size = (
            shared.flags, PublishedWeights(shared.weights), shared.task.num_parameters
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        return bool(self._flags["written"][0] != self._flags["taken"][0])

    def snapshot(self) -> Tensor:
        weights = torch.empty(self._size)
        self._weights.read(weights)
        return weights

    def add(self, correction: Tensor) -> None:
        self._flags["parameters_correction"].copy_(correction)
        self._flags["written"][0] += 1


class Records:
    """What the head hears of all machines, and how it becomes updates of the run."""

    def __init__(self, run: Run, here: ActorLearnerMachine) -> None:
        self.run, self.here, self._recorder = run, here, UpdateRecorder(run)
        self._reporters = len(here.cluster.nodes) if here.shared.is_on_its_own else 1  # of steps and losses
        self._together: list[dict[str, Any]] = []
        self._asynchrony: dict[int, dict[str, float]] = {}  # of each machine, the last that was heard
        self._times: dict[int, dict[str, Any]] = {}
        self._exchanges_before = exchanges_before(run)
        self._final_state: dict[str, Any] | None = None

    def hear(self, node: int, kind: str, content: Any) -> None:
        if kind == "episodes":
            self._recorder.episodes.extend(map(tuple, content))
        elif kind == "record":
            is_counted = node == 0 or self.here.shared.is_on_its_own  # else it is the same step
            if is_counted:
                self._record_if_complete()  # not before: episodes of other machines arrive later than this one's
            self._asynchrony[node] = content["asynchrony"]
            if is_counted:
                self._together.append(content)
                self._times[0] = self.here.times()
        elif kind == "bad numbers":
            self.run.note_bad(content, is_whole_update=True)
        elif kind == "times":
            self._times[node] = content
        elif kind == "save":
            self._record_if_complete()
            self.run.save(checkpoint.unpack(content))
        elif kind == "final state":
            self._final_state = checkpoint.unpack(content)

    def record_the_rest(self) -> None:
        if self._together:
            self._record()

    def finish(self) -> None:
        assert self._final_state is not None
        self.run.finish(self._final_state)

    def _record_if_complete(self) -> None:
        if len(self._together) == self._reporters:
            self._record()

    def _record(self) -> None:
        """As many updates as there are machines that take their own count as one."""
        learners, actors = (
            torch.tensor([row for table in self._times.values() for row in table[who]], dtype=torch.float64)
            for who in ("learners", "actors")
        )
        report = {
            "steps": sum(part["steps"] for part in self._together),
            "losses": mean_of([part["losses"] for part in self._together]),
            "asynchrony": _merged(list(self._asynchrony.values())),
            "at": max(part["at"] for part in self._together),
        }
        if self.here.shared.is_on_its_own:
            report["asynchrony"][EXCHANGES] = float(self._exchanges_before + self.here.council.exchanges)
        self._together.clear()
        self._recorder.record(report, learners, actors, sum(table["restarts"] for table in self._times.values()))


def _merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Means over the machines; of what is called _max, the largest."""
    largest = {name: max(part[name] for part in parts) for name in parts[0] if name.endswith("_max")}
    return mean_of(parts) | largest
