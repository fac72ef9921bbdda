"""What the processes of a run tell their parent, and other machines the head: a record for each thing to say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


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
