"""IMPALA: actors that only act, learners that only learn, neither waiting for the other while there is something to do.

Actors fill unrolls in shared memory (unrolls.py) with the newest weights (published_weights.py). Learners are
data-parallel: of the unrolls of a step each takes the next when it is ready for one, so that a slow core holds up
nobody, and their gradients are summed as PPO's are. The parent only watches, and replaces actors that die.
Each of several machines has actors, learners and unrolls of its own. With `allreduce` the first learners of all
machines take every step together: they agree on it, and sum their machines' gradients. With `async` each machine takes
its own steps, and its parameters are corrected now and then towards the mean of all. In both, the node processes tell
the head of episodes and times without waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.actor_learner.actor_process import act
from rl_cluster_benchmark.execution.actor_learner.learner_process import learn_in_step
from rl_cluster_benchmark.execution.actor_learner.machines_updates import MachinesUpdates
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_averaging import NUM_COUNTS, averaging_of
from rl_cluster_benchmark.execution.machines.machine_links import LostContactError, MachineShare
from rl_cluster_benchmark.execution.machines.machine_supervisor import MachineSupervisor
from rl_cluster_benchmark.execution.messages import LostContact, ProcessTimes, Report
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.pool import WorkerPool, end_of
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run.run import Run


class ActorLearnerMachine:
    """One machine's actors and learners; see training/executions.py for what is asked of it."""

    def __init__(self, cluster: Cluster | MachineAlone, share: MachineShare) -> None:
        self.cluster, self.config, self.plan, self.progress = cluster, share.config, share.plan, share.progress
        self.shared = Shared(share)
        self.replace = Replacements(self.shared, share.progress)

    def updates(self, run: Run) -> MachinesUpdates:
        return MachinesUpdates(run, self.shared, self.times)

    def train(self, *, look: Callable[[], int], start: Callable[[], None], hear: Callable[[int, Report], None]) -> None:
        shared, plan = self.shared, self.plan
        averaging = averaging_of(
            shared.seat,
            counts=self.counts,
            exchange=PublishedParameters(shared) if shared.is_on_its_own else None,
            updates_between=self.config.cluster.sync_every * shared.seat.num_nodes,
            hear=hear,
        )
        machine = MachineSupervisor(
            self.cluster, self.config, averaging, shared.flags, self.progress["steps"],
            look=look, start=start, times=self.times,
        )  # fmt: skip
        args, num_processes = (shared, self.progress, 0), plan.num_learners + plan.num_workers
        limit = limit_of(self.config)
        with WorkerPool(work, num_processes, args, plan.cores, self.replace, limit) as pool:
            machine.run(pool, hear)

    def counts(self) -> list[float]:
        """Return what this machine has counted for itself; machines in step with it know its counts."""
        return self.shared.flags["here"].tolist() if self.shared.is_on_its_own else [0.0] * NUM_COUNTS

    def times(self) -> ProcessTimes:
        """Return where the processes of this machine spend their time, and how many actors were replaced."""
        return ProcessTimes(self.shared.flags["times"].tolist(), self.plan.num_learners, self.replace.count)


class Replacements:
    """Decides what becomes of a process that died: an actor gets a successor, a learner ends the run."""

    def __init__(self, shared: Shared, progress: dict[str, Any]) -> None:
        self.shared, self.progress, self.count = shared, progress, 0

    def __call__(self, rank: int, how: str) -> tuple[Any, ...] | None:
        shared, most = self.shared, self.shared.config.impala.max_actor_restarts
        if rank >= shared.num_learners and shared.board().stopped:
            return None  # the run is ending anyway
        if rank < shared.num_learners or not int(shared.flags["go"][0]):
            raise end_of(shared.name(rank), how)
        if self.count == most:
            raise end_of(f"After {most} restarts (impala.max_actor_restarts) {shared.name(rank)}", how)
        self.count += 1
        print(f"{shared.name(rank)} {how.strip()}\nAnother takes its place.", flush=True)
        return shared, self.progress, self.count


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


def work(rank: int, connection: Connection, shared: Shared, progress: dict[str, Any], restarts: int) -> None:
    """Run an actor or a learner, in its process."""
    process.prepare_process(shared.plan.num_threads)
    clock = PhaseClock()
    keeper = process_times.TimeKeeper(shared.flags["times"][rank], clock)
    try:
        if rank < shared.num_learners:
            learn_in_step(rank, connection, shared, progress, keeper)
        else:
            act(rank - shared.num_learners, connection, shared, progress, restarts, keeper)
    except LostContactError as error:
        connection.send(LostContact(str(error)))
    keeper.write()
