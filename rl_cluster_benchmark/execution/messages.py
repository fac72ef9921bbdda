"""What the processes of a run tell each other, a record for each thing to say, and how the parent writes it down.

Processes report to their parent, other machines to the head; parents give orders through memory that all workers see.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rl_cluster_benchmark.learning.losses import mean_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run

TIME_IS_UP, INTERRUPTED = 1, 2  # orders; 0 is none


@dataclass(frozen=True)
class Started:
    """A process is ready to train."""

    greeting: str


@dataclass(frozen=True)
class AllStarted:
    """The workers of all machines are ready, and time counts: said by a worker that knows it of the others."""


@dataclass(frozen=True)
class MeanTimes:
    """What the workers of all machines have spent their time on since the run began."""

    phase_seconds: dict[str, float]  # mean over the workers
    cpu_seconds: float  # of all workers


@dataclass(frozen=True)
class UpdateMade:
    """Experience was learned from."""

    steps: int
    losses: dict[str, float]
    at: float  # seconds of training
    episodes: list[tuple[float, ...]] = field(default_factory=list)  # that have ended: (reward, length, ...)
    asynchrony: dict[str, float] = field(default_factory=dict)  # metrics of runs whose processes do not wait
    times: MeanTimes | None = None  # None where each process writes its own to shared memory


@dataclass(frozen=True)
class EpisodesEnded:
    """Episodes have ended: (reward, length, ...)."""

    episodes: list[tuple[float, ...]]


@dataclass(frozen=True)
class BadNumbers:
    """NaN or infinite numbers were met and left out: how many of each kind."""

    counts: dict[str, float]


@dataclass(frozen=True)
class ProcessTimes:
    """Where a machine's processes spend their time: the rows of its table, those of IMPALA's learners first."""

    rows: list[list[float]]
    num_learners: int = 0
    restarts: int = 0  # of actors


@dataclass(frozen=True)
class StateToSave:
    """A checkpoint is due: what the learner has to say to it, packed."""

    state: bytes


@dataclass(frozen=True)
class FinalState:
    """The same at the end of the run."""

    state: bytes


@dataclass(frozen=True)
class NothingLeftToDo:
    """A machine's first worker has nothing left to do but to save, once that is true of all machines."""


@dataclass(frozen=True)
class LostContact:
    """The way to other machines is broken."""

    reason: str


@dataclass(frozen=True)
class SignalElsewhere:
    """A machine has received a signal: all are to end with its status."""

    node: int
    number: int


Report = Started | UpdateMade | EpisodesEnded | BadNumbers | ProcessTimes | StateToSave | FinalState  # for the head

ACROSS_MACHINES = {kind.__name__: kind for kind in (UpdateMade, EpisodesEnded, BadNumbers, ProcessTimes)}


def to_line(report: Report) -> bytes:
    """Return a report as a line of JSON, for the head."""
    assert type(report).__name__ in ACROSS_MACHINES, report
    return json.dumps([type(report).__name__, asdict(report)]).encode() + b"\n"


def from_line(line: bytes) -> Report:
    """Return the report that another machine has made a line of."""
    name, fields = json.loads(line)
    kind: Any = ACROSS_MACHINES[name]
    return kind(**fields)


class Updates(Protocol):
    """How what is heard of processes and machines becomes updates of the run."""

    def hear(self, node: int, report: UpdateMade | EpisodesEnded | ProcessTimes) -> None:
        """Take a report of that machine in; make an update of the run if it completes one."""
        ...

    def complete(self) -> None:
        """Make an update of the run of whatever is left, as before a checkpoint, which counts it."""
        ...


class Reports:
    """Writes a run down: the one place where what the processes of all machines report is told apart."""

    def __init__(self, run: Run, updates: Updates) -> None:
        self._run, self._updates = run, updates

    def hear(self, node: int, report: Report) -> None:
        """Do what the report of that machine asks for."""
        run = self._run
        match report:
            case Started(greeting):
                print(greeting, flush=True)
            case UpdateMade() | EpisodesEnded() | ProcessTimes():
                self._updates.hear(node, report)
            case BadNumbers(counts):
                run.note_bad(counts, is_whole_update=True)
            case StateToSave(state):
                self._updates.complete()
                run.save(checkpoint.unpack(state))
            case FinalState(state):
                self._updates.complete()
                run.finish(lambda: checkpoint.unpack(state))


def merged(parts: Sequence[UpdateMade]) -> UpdateMade:
    """Return updates of several workers or machines as one."""
    return UpdateMade(
        steps=sum(part.steps for part in parts),
        losses=mean_of([part.losses for part in parts]),
        at=max(part.at for part in parts),
        episodes=[episode for part in parts for episode in part.episodes],
        asynchrony=merged_metrics([part.asynchrony for part in parts]),
    )


def merged_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the means of metrics; of what is called _max, the largest."""
    largest = {name: max(part[name] for part in parts) for name in parts[0] if name.endswith("_max")}
    return mean_of(parts) | largest


def order_of(run: Run) -> int:
    """Return what the workers of a run are to be told now: INTERRUPTED, TIME_IS_UP, or 0 to go on."""
    return INTERRUPTED if run.interrupted() else TIME_IS_UP if run.should_stop() else 0


class Orders:
    """A worker's view of the order, which is the first number of the memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory.numpy()

    def interrupted(self) -> bool:
        """Return whether to end as soon as the model is in good order."""
        return bool(self._memory[0] == INTERRUPTED)

    def should_stop(self, updates: int) -> bool:
        """Return whether to drop a rollout: when time is up, not before there has been an update."""
        return self.interrupted() or bool(self._memory[0] == TIME_IS_UP and updates > 0)
