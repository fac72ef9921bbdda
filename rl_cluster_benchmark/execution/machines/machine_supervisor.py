"""A machine's node process in a run whose machines do not wait for each other: between workers and averaging."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_averaging import (
    NUM_COUNTS,
    STEPS,
    TIME_IS_OVER,
    MachineAveraging,
    NoAveraging,
)
from rl_cluster_benchmark.execution.machines.machine_links import LostContactError
from rl_cluster_benchmark.execution.messages import (
    INTERRUPTED,
    TIME_IS_UP,
    BadNumbers,
    EpisodesEnded,
    LostContact,
    NothingLeftToDo,
    ProcessTimes,
    Report,
    Started,
    UpdateMade,
)
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.shared_memory import MemoryLayout, SharedTensors
from rl_cluster_benchmark.run.course import Goal

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_BETWEEN_TIMES = 1.0


def layout() -> MemoryLayout:
    """Return what a node process shares with its workers, to tell them how the run stands."""
    return {
        "order": ((1,), torch.int64),
        "go": ((1,), torch.int64),
        "closed": ((1,), torch.int64),  # all machines are done: whatever is to be saved can be
        "elsewhere": ((NUM_COUNTS,), torch.float64),  # counts of the other machines
    }


class MachineSupervisor:
    """Stands between the processes of a machine and the other machines, and says when all begin and end."""

    def __init__(
        self, cluster: Cluster | MachineAlone, config: Config, averaging: MachineAveraging | NoAveraging,
        flags: SharedTensors, steps_before: int, *, look: Callable[[], int], start: Callable[[], None],
        times: Callable[[], ProcessTimes],
    ) -> None:  # fmt: skip
        """`look` gives the order for the workers as this machine sees it, `start` is called when time begins to count,
        `times` is what the head is told now and then of where the workers spend theirs.
        """
        self.cluster, self.averaging, self.flags, self._goal = cluster, averaging, flags, Goal(config.training)
        self._steps_before, self._look, self._start, self._times = steps_before, look, start, times
        self._first_is_done, self._told_at = False, 0.0

    def run(self, pool: WorkerPool, hear: Callable[[int, Report], None]) -> None:
        """Watch until all workers of all machines have ended; what those here report goes to the head, there to `hear`.

        The first of them says that it is done when nothing is left to do but to save, and ends once that is true of all
        machines; the others just end.
        """
        started: set[int] = set()

        def watch() -> None:
            self.averaging.ready = len(started) == pool.num_workers
            done = self._first_is_done and pool.num_finished == pool.num_workers - 1
            self._tell_times(now=done and not self.averaging.done)
            self.averaging.done = done
            self._talk()
            self.cluster.membership.check()

        try:
            for rank, message in pool.messages(watch, SECONDS_BETWEEN_LOOKS):
                match message:
                    case LostContact(reason):
                        raise LostContactError(reason)
                    case NothingLeftToDo():
                        self._first_is_done = True
                    case _ if self.cluster.is_head:
                        hear(0, message)
                    case UpdateMade() | EpisodesEnded() | BadNumbers():
                        self.averaging.report(message)
                if isinstance(message, Started):
                    started.add(rank)
        except LostContactError as error:
            raise self.cluster.membership.explain(error) from None

    def _tell_times(self, now: bool) -> None:
        if not self.cluster.is_head and (now or time.monotonic() - self._told_at > SECONDS_BETWEEN_TIMES):
            self.averaging.report(self._times())
            self._told_at = time.monotonic()

    def _talk(self) -> None:
        averaging, flags = self.averaging, self.flags
        if not averaging.has_begun:
            self.cluster.signals.check()
        order = self._look()
        averaging.time_is_over |= order == TIME_IS_UP
        averaging.signal = self.cluster.signals.received or 0
        averaging.poll()
        if not averaging.has_begun:
            return
        if not int(flags["go"][0]):
            self._start()
            flags["go"][0] = 1
        flags["elsewhere"].copy_(averaging.elsewhere)
        self._give_orders()
        if averaging.is_over:
            flags["closed"][0] = 1

    def _give_orders(self) -> None:
        """Give this machine's workers their order, which follows from what all machines have said, on each of them."""
        word = self.averaging.heard
        assert word is not None
        steps = self._steps_before + int(word.counts[STEPS])
        if any(word.signals):
            self.flags["order"][0] = INTERRUPTED
            node, number = next((node, number) for node, number in enumerate(word.signals) if number)
            self.cluster.take_signal(node, number)
        elif word.any_is(TIME_IS_OVER) or self._goal.is_reached(steps):
            self.flags["order"][0] = TIME_IS_UP
