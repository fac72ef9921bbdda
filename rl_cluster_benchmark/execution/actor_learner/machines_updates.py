"""How what is heard of IMPALA's actors and learners becomes updates of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.machines.machine_averaging import EXCHANGES, exchanges_before
from rl_cluster_benchmark.execution.messages import EpisodesEnded, ProcessTimes, UpdateMade, merged, merged_metrics
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.run.run import Run


class UpdateRecorder:
    """Writes down updates: with them the episodes that have ended, and where all processes spend their time."""

    def __init__(self, run: Run) -> None:
        self.run, self.episodes = run, list[tuple[float, ...]]()
        self._seconds_before = dict(run.clock.seconds)
        self._waits_before = dict(run.asynchrony.waits)
        self._restarts_before = int(run.asynchrony.summary().get("actor_restarts", 0))

    def record(self, update: UpdateMade, learners: Tensor, actors: Tensor, restarts: int) -> None:
        """Make an update of the run; `learners` and `actors` have a row of times for each process."""
        everyone = torch.cat([learners, actors])
        self.run.clock.seconds = process_times.mean_phases(everyone, self._seconds_before)
        self.run.worker_cpu_seconds = process_times.cpu_seconds(everyone)
        asynchrony = update.asynchrony | {
            "async/learner_idle": self._idle("learner", learners),
            "async/actor_idle": self._idle("actor", actors),
            "system/actor_restarts": float(self._restarts_before + restarts),
        }
        self.run.record(update.steps, self.episodes, update.losses, asynchrony, update.at)
        self.episodes.clear()

    def _idle(self, role: str, table: Tensor) -> float:
        """Return the share of their time, that before a resume included, which a role's processes have waited."""
        before = self._waits_before.get(role, [0.0, 0.0])
        waited, lived = (old + new for old, new in zip(before, process_times.waits(table), strict=True))
        self.run.asynchrony.waits[role] = [waited, lived]
        return waited / lived if lived > 0 else 0.0


class MachinesUpdates:
    """Updates of a machine, of machines that take every step together, or of machines that take their own.

    Of the last, as many updates as there are machines count as one of the run.
    """

    def __init__(self, run: Run, shared: Shared, times: Callable[[], ProcessTimes]) -> None:
        """`times` gives where the processes of this machine spend theirs."""
        self._run, self._shared, self._times_here, self._recorder = run, shared, times, UpdateRecorder(run)
        self._reporters = shared.seat.num_nodes if shared.is_on_its_own else 1  # of steps and losses
        self._together: list[UpdateMade] = []
        self._asynchrony: dict[int, dict[str, float]] = {}  # of each machine, the last that was heard
        self._times: dict[int, ProcessTimes] = {}
        self._exchanges_before = exchanges_before(run)

    def hear(self, node: int, report: UpdateMade | EpisodesEnded | ProcessTimes) -> None:
        match report:
            case EpisodesEnded(episodes):
                self._recorder.episodes.extend(map(tuple, episodes))
            case ProcessTimes():
                self._times[node] = report
            case UpdateMade():
                is_counted = node == 0 or self._shared.is_on_its_own  # else it is the same step
                if is_counted:
                    self._record_if_whole()  # not before: episodes of other machines arrive later than this one's
                self._asynchrony[node] = report.asynchrony
                if is_counted:
                    self._together.append(report)
                    self._times[0] = self._times_here()
                if self._shared.seat.num_nodes == 1:
                    self.complete()

    def complete(self) -> None:
        """Make an update of the run of whatever has been heard since the last one."""
        if self._together:
            self._record()

    def _record_if_whole(self) -> None:
        if len(self._together) == self._reporters:
            self._record()

    def _record(self) -> None:
        tables = self._times.values()
        learners, actors = (
            torch.tensor([row for rows in tables_of_role for row in rows], dtype=torch.float64)
            for tables_of_role in (
                [table.rows[: table.num_learners] for table in tables],
                [table.rows[table.num_learners :] for table in tables],
            )
        )
        asynchrony = merged_metrics(list(self._asynchrony.values()))
        if self._shared.is_on_its_own:
            asynchrony[EXCHANGES] = float(self._exchanges_before + self._shared.num_exchanges)
        update = replace(merged(self._together), asynchrony=asynchrony)
        self._together.clear()
        self._recorder.record(update, learners, actors, sum(table.restarts for table in tables))
