"""What the node processes of a run tell each other while their workers go on: nobody waits for anybody.

They talk in rounds, each a small sum over all machines that is under way while the processes do other things. All see
the same result of each round, and so all take the same next one: another talk, an exchange of parameters, or the end.
Whatever a machine has to report travels to the head beside a talk, as lines of JSON.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rl_cluster_benchmark.execution.machines.machine_links import MachineLinks, MachineSeat, told_as_loss
from rl_cluster_benchmark.execution.messages import Report, from_line, to_line
from rl_cluster_benchmark.run.run import Run

SECONDS_BETWEEN_TALKS = (0.02, 0.2)  # when there is something to decide; when there is not
READY, DONE, BUSY, TIME_IS_OVER, COUNTS = 0, 1, 2, 3, 4  # places in what is summed; then one count after the other,
NUM_COUNTS = 5  # steps, updates, and the number, sum and sum of squares of discounted returns
STEPS, UPDATES, MOMENTS = 0, 1, slice(2, 5)  # places among the counts
SIGNALS = COUNTS + NUM_COUNTS  # then a number for each machine: the signal that it received,
# and again one for each: the bytes that it has to report

EXCHANGES = "system/parameter_exchanges"  # the metric that counts them

T = TypeVar("T")
Waits = Generator[None, None, T]  # yields while there is something to wait for, then returns


class Exchange(Protocol):
    """The parameters of one machine, while its workers go on changing them."""

    @property
    def busy(self) -> bool:
        """Return whether the last correction is not in them yet."""
        ...

    def snapshot(self) -> Tensor:
        """Return a copy of what they are now."""
        ...

    def add(self, correction: Tensor) -> None: ...


@dataclass(frozen=True)
class Word:
    """What all machines have said in a talk, summed."""

    total: Tensor
    num_nodes: int

    def all_are(self, place: int) -> bool:
        return int(self.total[place]) == self.num_nodes

    def any_is(self, place: int) -> bool:
        return bool(self.total[place] > 0)

    @property
    def counts(self) -> Tensor:
        return self.total[COUNTS:SIGNALS]

    @property
    def signals(self) -> list[int]:
        return [int(number) for number in self.total[SIGNALS : SIGNALS + self.num_nodes].tolist()]

    @property
    def longest_report(self) -> int:
        return int(self.total[SIGNALS + self.num_nodes :].max())


class MachineAveraging:
    """One machine's part in the averaging rounds. Its parent process sets what it has to say, and polls meanwhile."""

    def __init__(
        self, seat: MachineSeat, *, counts: Callable[[], Sequence[float]], exchange: Exchange | None,
        updates_between: int, hear: Callable[[int, Report], None],
    ) -> None:  # fmt: skip
        """`counts` gives this machine's; parameters are exchanged whenever all machines together have counted
        `updates_between` updates more; `hear`, on the head, gets what other machines report.
        """
        self.seat, self._counts, self._exchange, self._hear = seat, counts, exchange, hear
        self._updates_between = updates_between
        self._leaders = MachineLinks(seat, "averaging")
        self.ready = self.done = self.time_is_over = False
        self.signal = 0
        self.has_begun = self.is_over = False
        self.elsewhere = torch.zeros(NUM_COUNTS, dtype=torch.float64)  # counts of the other machines
        self.heard: Word | None = None
        self.exchanges = 0
        self._reports: deque[bytes] = deque()
        self._room = 0  # bytes for the reports of each machine, beside the next talk
        self._talked_at, self._updates_told = 0.0, 0.0
        self._course = self._converse()

    def report(self, report: Report) -> None:
        """Tell the head, with one of the next talks."""
        self._reports.append(to_line(report))

    def poll(self) -> None:
        """Go on where something that was waited for has come. Raises LostContactError if a machine is gone."""
        next(self._course, None)

    def _converse(self) -> Waits[None]:
        """Talk from the first word to the last."""
        while not (yield from self._talk()).all_are(READY):
            pass
        self.has_begun = True
        exchanged_at = 0
        while True:
            word = yield from self._talk()
            if word.all_are(DONE) and not word.any_is(BUSY):
                break
            updates = int(word.counts[UPDATES])
            if updates - exchanged_at >= self._updates_between and not word.any_is(BUSY):
                yield from self._exchange_parameters()
                exchanged_at = updates
        yield from self._exchange_parameters()  # nobody changes them any more: all have the same from here on
        while (yield from self._talk()).longest_report > 0:
            pass
        self.is_over = True

    def _talk(self) -> Waits[Word]:
        while time.monotonic() - self._talked_at < SECONDS_BETWEEN_TALKS[not self._is_urgent()]:
            yield
        works: list[Any] = []
        rows: list[Tensor] = []
        if self._room > 0:
            gathering, rows = self._leaders.start_gather(self._filled())
            works.append(gathering)
        here = torch.tensor(self._counts(), dtype=torch.float64)
        total = self._said(here)
        yield from self._finish([*works, self._leaders.start_sum(total)])
        self._talked_at, self._updates_told = time.monotonic(), float(here[UPDATES])
        self.heard = word = Word(total, self.seat.num_nodes)
        self.elsewhere = word.counts - here
        self._room = word.longest_report
        for node, row in enumerate(rows):
            for line in filter(None, bytes(row.numpy()).split(b"\n")):
                self._hear(node, from_line(line))
        return word

    def _is_urgent(self) -> bool:
        """Return whether there is something to decide, or an exchange is due if others have done as much as this."""
        news = self._counts()[UPDATES] - self._updates_told
        due = self._exchange is not None and news * self.seat.num_nodes >= self._updates_between
        return due or not self.has_begun or self.done or self.time_is_over or self.signal > 0

    def _exchange_parameters(self) -> Waits[None]:
        """Add to every machine's parameters what the mean of all was ahead of its own, when each looked."""
        if self._exchange is None:
            return
        snapshot = self._exchange.snapshot()
        mean = snapshot / self.seat.num_nodes
        yield from self._finish([self._leaders.start_sum(mean)])
        self._exchange.add(mean - snapshot)
        self.exchanges += 1

    def _finish(self, works: Sequence[Any]) -> Waits[None]:
        while not all(work.is_completed() for work in works):
            yield
        with told_as_loss(self.seat):
            for work in works:
                work.wait()

    def _said(self, counts: Tensor) -> Tensor:
        node, num_nodes = self.seat.node_rank, self.seat.num_nodes
        busy = self._exchange is not None and self._exchange.busy
        mine = torch.zeros(SIGNALS + 2 * num_nodes, dtype=torch.float64)
        mine[:COUNTS] = torch.tensor([self.ready, self.done, busy, self.time_is_over], dtype=torch.float64)
        mine[COUNTS:SIGNALS] = counts
        mine[SIGNALS + node] = self.signal
        mine[SIGNALS + num_nodes + node] = sum(map(len, self._reports))
        return mine

    def _filled(self) -> Tensor:
        """Return as many reports as there is room for: at least those that there were at the last talk."""
        text = b""
        while self._reports and len(text) + len(self._reports[0]) <= self._room:
            text += self._reports.popleft()
        return torch.frombuffer(bytearray(text.ljust(self._room, b"\n")), dtype=torch.uint8)


class NoAveraging:
    """Stands in for the rounds where a machine trains alone: what it says holds at once, and parameters are its own."""

    def __init__(self) -> None:
        self.ready = self.done = self.time_is_over = False
        self.signal = self.exchanges = 0
        self.elsewhere = torch.zeros(NUM_COUNTS, dtype=torch.float64)

    @property
    def has_begun(self) -> bool:
        return self.ready

    @property
    def is_over(self) -> bool:
        return self.done

    @property
    def heard(self) -> Word:
        """Return what this machine says. It counts nothing: its workers know each other's counts."""
        total = torch.zeros(SIGNALS + 2, dtype=torch.float64)
        total[TIME_IS_OVER], total[SIGNALS] = self.time_is_over, self.signal
        return Word(total, num_nodes=1)

    def report(self, report: Report) -> None:
        raise AssertionError("a machine alone is its own head")

    def poll(self) -> None:
        """Do nothing: there is nobody to talk to."""


def averaging_of(
    seat: MachineSeat, *, counts: Callable[[], Sequence[float]], exchange: Exchange | None, updates_between: int,
    hear: Callable[[int, Report], None],
) -> MachineAveraging | NoAveraging:  # fmt: skip
    """Return a machine's seat in the averaging rounds; the arguments are those of MachineAveraging."""
    if seat.num_nodes == 1:
        return NoAveraging()
    return MachineAveraging(seat, counts=counts, exchange=exchange, updates_between=updates_between, hear=hear)


def exchanges_before(run: Run) -> int:
    """Return how often parameters had been exchanged before a resume."""
    return int(run.asynchrony.summary().get(EXCHANGES.rpartition("/")[2], 0))
