"""How a run is written down from what its processes report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rl_cluster_benchmark.execution.messages import (
    BadNumbers,
    EpisodesEnded,
    FinalState,
    ProcessTimes,
    Report,
    Started,
    StateToSave,
    UpdateMade,
)
from rl_cluster_benchmark.learning.bad_numbers import mean_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run


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
                run.finish(checkpoint.unpack(state))


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
