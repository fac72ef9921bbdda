"""What the head of an IMPALA run, or a machine alone, hears of actors and learners, and how it becomes updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.machines.machine_averaging import EXCHANGES, exchanges_before
from rl_cluster_benchmark.learning.bad_numbers import mean_of
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run


class UpdateRecorder:
    """Writes down updates: with them the episodes that have ended, and where all processes spend their time."""

    def __init__(self, run: Run) -> None:
        self.run, self.episodes = run, list[tuple[float, int]]()
        self._seconds_before = dict(run.clock.seconds)
        self._waits_before = dict(run.asynchrony.waits)
        self._restarts_before = int(run.asynchrony.summary().get("actor_restarts", 0))

    def record(self, report: dict[str, Any], learners: Tensor, actors: Tensor, restarts: int) -> None:
        """`learners` and `actors`: a row of times for each."""
        everyone = torch.cat([learners, actors])
        self.run.clock.seconds = process_times.mean_phases(everyone, self._seconds_before)
        self.run.worker_cpu_seconds = process_times.cpu_seconds(everyone)
        asynchrony = report["asynchrony"] | {
            "async/learner_idle": self._idle("learner", learners),
            "async/actor_idle": self._idle("actor", actors),
            "system/actor_restarts": float(self._restarts_before + restarts),
        }
        self.run.record(report["steps"], self.episodes, report["losses"], asynchrony, report["at"])
        self.episodes.clear()

    def _idle(self, role: str, table: Tensor) -> float:
        """Return the share of their time, that before a resume included, which a role's processes have waited."""
        before = self._waits_before.get(role, [0.0, 0.0])
        waited, lived = (old + new for old, new in zip(before, process_times.waits(table), strict=True))
        self.run.asynchrony.waits[role] = [waited, lived]
        return waited / lived if lived > 0 else 0.0


class Records:
    """What is heard of all machines, and how it becomes updates of the run."""

    def __init__(self, run: Run, shared: Shared, times: Callable[[], dict[str, Any]]) -> None:
        """`times` gives where the processes of this machine spend theirs."""
        self.run, self._shared, self._times_here, self._recorder = run, shared, times, UpdateRecorder(run)
        self._reporters = shared.seat.num_nodes if shared.is_on_its_own else 1  # of steps and losses
        self._together: list[dict[str, Any]] = []
        self._asynchrony: dict[int, dict[str, float]] = {}  # of each machine, the last that was heard
        self._times: dict[int, dict[str, Any]] = {}
        self._exchanges_before = exchanges_before(run)

    def hear(self, node: int, kind: str, content: Any) -> None:
        if kind == "started":
            print(content, flush=True)
        elif kind == "episodes":
            self._recorder.episodes.extend(map(tuple, content))
        elif kind == "record":
            is_counted = node == 0 or self._shared.is_on_its_own  # else it is the same step
            if is_counted:
                self._record_if_complete()  # not before: episodes of other machines arrive later than this one's
            self._asynchrony[node] = content["asynchrony"]
            if is_counted:
                self._together.append(content)
                self._times[0] = self._times_here()
            if self._shared.seat.num_nodes == 1:
                self._record_if_complete()
        elif kind == "bad numbers":
            self.run.note_bad(content, is_whole_update=True)
        elif kind == "times":
            self._times[node] = content
        elif kind == "save":
            self._record_if_complete()
            self.run.save(checkpoint.unpack(content))
        elif kind == "final state":
            self.record_the_rest()
            self.run.finish(checkpoint.unpack(content))

    def record_the_rest(self) -> None:
        if self._together:
            self._record()

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
        if self._shared.is_on_its_own:
            report["asynchrony"][EXCHANGES] = float(self._exchanges_before + self._shared.num_exchanges)
        self._together.clear()
        self._recorder.record(report, learners, actors, sum(table["restarts"] for table in self._times.values()))


def _merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """Means over the machines; of what is called _max, the largest."""
    largest = {name: max(part[name] for part in parts) for name in parts[0] if name.endswith("_max")}
    return mean_of(parts) | largest
