"""One running trial: its runs train side by side, are judged together at every rung, and end together.

A run is judged by the mean return over a stretch of its log; trials are stopped by successive halving.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.processes.child_process import ChildProcess, reason_of_failure, rlcb
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.analysis.runs import is_running
from rl_cluster_benchmark.tools.analysis.series import GrowingLog
from rl_cluster_benchmark.tools.benchmark.removal import log_of, remove_cells, runs_locked
from rl_cluster_benchmark.tools.search.search_space import Rung
from rl_cluster_benchmark.tools.search.study import SETTINGS, Study, TrialClaim

SECONDS_BETWEEN_READINGS = 1.0


class RunningTrial:
    """A claimed trial. `look` is called again and again until it returns True: then the trial has ended and is saved.

    `shares` are the cores of each of its runs; None leaves the cores to the system.
    """

    def __init__(
        self, study: Study, claim: TrialClaim, shares: Sequence[Collection[int] | None], say: Callable[[str], None]
    ) -> None:
        self.study, self.claim, self.trial, self.shares, self._say = study, claim, claim.trial, shares, say
        self.folder = study.folder(self.trial.number)
        self.runs = {name: self.folder / name for name in study.space.runs()}
        self._children: dict[str, ChildProcess] = {}
        self._logs: dict[str, Log] = {}
        self._started = time.monotonic()
        self._next_reading = 0.0
        self._was_waiting = False
        self._end: tuple[str, str | None] | None = None  # state and reason, once that is decided

    def look(self) -> bool:
        """Go on with what is to be done for the trial; return whether it has ended."""
        if not self._children and self._end is None:
            if any(is_running(run) for run in self.runs.values()):
                if not self._was_waiting:
                    self._say(f"Trial {self.trial.number} waits until the runs that a killed search left have ended.")
                self._was_waiting = True
                return False
            self._begin()
        ended = [name for name, child in self._children.items() if child.has_ended()]
        failed = [name for name in ended if self._children[name].status != 0]
        all_ended = len(ended) == len(self._children)
        if self._end is None and (failed or all_ended or time.monotonic() >= self._next_reading):
            self._next_reading = time.monotonic() + SECONDS_BETWEEN_READINGS
            self._judge()
            if self._end is None and failed:
                self._fail(failed)
            if self._end is None and all_ended:
                self._finish()
        if self._end is None or not all_ended:
            return False
        self.trial.state, self.trial.reason = self._end  # type: ignore[assignment]
        self.trial.seconds = time.monotonic() - self._started
        with self.study.locked():
            self.study.save(self.trial)
        return True

    def fraction(self) -> float:
        """Return how much of its steps it has made."""
        steps = [log.points[-1].step if log.points else 0.0 for log in self._logs.values()]
        return min(1.0, sum(steps) / len(self.runs) / self.study.space.total_timesteps)

    def ask_to_end(self) -> None:
        for child in self._children.values():
            child.ask_to_end()

    def has_ended(self) -> bool:
        """Return whether all its processes have ended."""
        return all(child.has_ended() for child in self._children.values())

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()

    def _begin(self) -> None:
        """Start the runs, in place of what an earlier attempt at this trial left."""
        self._started = time.monotonic()
        with runs_locked(list(self.runs.values())):
            remove_cells(list(self.runs.values()))
        try:
            config = self.study.space.config_of(self.trial.params)
        except UserError as error:
            self._decide("failed", str(error))
            return
        settings = self.folder / SETTINGS
        write_atomically(settings, configs.to_yaml(config).encode())
        for (name, (game, seed)), cores in zip(self.study.space.runs().items(), self.shares, strict=True):
            place = self.runs[name]
            call = rlcb("train", "--config", settings, "--env", game, "--seed", seed, "--output-dir", place)
            self._children[name] = ChildProcess(call, output=log_of(place), cores=cores)
            here = config.model_copy(update={"output_dir": str(place)})
            self._logs[name] = Log(RunDirectory.of(here).metrics_log)

    def _decide(self, state: str, reason: str | None = None) -> None:
        self._end = (state, reason)
        self.ask_to_end()

    def _fail(self, failed: Sequence[str]) -> None:
        """End a trial that has a failed run, unless all its runs can still be judged at the next rung.

        So whether a trial counts as stopped or as failed does not depend on when its runs are looked at.
        """
        rungs = self.study.space.prune[len(self.trial.rungs) :]
        for name in failed:
            points = self._logs[name].points
            if not rungs or not points or points[-1].step < rungs[0].at:
                reason = reason_of_failure(log_of(self.runs[name]), self._children[name].status)
                self._decide("failed", f"{name}: {reason}")
                return

    def _judge(self) -> None:
        """Look at the next rungs that all runs have reached, and stop the trial if it is among the worse ones."""
        space = self.study.space
        for log in self._logs.values():
            log.read()
        for rung in space.prune[len(self.trial.rungs) :]:
            if not all(log.points and log.points[-1].step >= rung.at for log in self._logs.values()):
                return
            returns = {name: log.mean_return(space.score.last_steps, rung.at) for name, log in self._logs.items()}
            known = {name: value for name, value in returns.items() if value is not None}
            if len(known) < len(returns):
                missing = next(name for name, value in returns.items() if value is None)
                self._decide("failed", self._no_episode(missing, rung.at))
                return
            value = space.score_of(known)
            with self.study.locked():
                trials = [trial for trial in self.study.trials() if trial.number != self.trial.number]
                self.trial.rungs[rung.at] = value
                self.study.save(self.trial)
            if is_stopped(rung, value, [trial.rungs[rung.at] for trial in trials if rung.at in trial.rungs]):
                self._decide("pruned")
                return

    def _finish(self) -> None:
        """Give the trial its score when all its runs have come to their end."""
        last_steps = self.study.space.score.last_steps
        for name, log in self._logs.items():
            value = log.mean_return(last_steps)
            if value is None or not math.isfinite(value):
                self._decide("failed", self._no_episode(name, self.study.space.total_timesteps))
                return
            self.trial.returns[name] = value
        self.trial.score = self.study.space.score_of(self.trial.returns)
        self._decide("complete")

    def _no_episode(self, name: str, at: int) -> str:
        return f"{name}: no episode ended in the {self.study.space.score.last_steps:,} steps before {at:,}"


class Point(NamedTuple):
    """A line of a run's log: counts since the start of the run."""

    step: float
    episodes: float
    return_sum: float


class Log:
    """The returns in the log of a run that is going on."""

    def __init__(self, path: Path) -> None:
        self.points: list[Point] = []
        self._log = GrowingLog(path)

    def read(self) -> None:
        """Take in the lines that were written since the last call."""
        for line in self._log.new_lines():
            if "charts/return_sum" in line:  # it is left out when it is infinite
                self.points.append(Point(line["step"], line["charts/episodes"], line["charts/return_sum"]))

    def mean_return(self, last_steps: int, at: int | None = None) -> float | None:
        """Return the mean return of the episodes that ended in the last steps before `at`; by default, before the end.

        The log has a line for every update or so. The stretch therefore ends with the first line at or after `at`, and
        begins with the last line that is at least `last_steps` before that one. None: no episode ended there.
        """
        if not self.points or (at is not None and self.points[-1].step < at):
            return None
        end = self.points[-1] if at is None else next(point for point in self.points if point.step >= at)
        earlier = [point for point in self.points if point.step <= end.step - last_steps]
        start = earlier[-1] if earlier else Point(0, 0, 0)
        episodes = end.episodes - start.episodes
        return (end.return_sum - start.return_sum) / episodes if episodes else None


def is_stopped(rung: Rung, value: float, others: Sequence[float]) -> bool:
    """Return whether a trial ends at this rung, with what the trials that reached it before had there.

    It goes on while fewer than `rung.after` have been there, and if it is among the best: of n trials, this one
    included, the best (1 - stop) n, rounded up. Equal values all go on.
    """
    if len(others) < rung.after:
        return False
    kept = math.ceil((1 - rung.stop) * (len(others) + 1) - 1e-9)
    return sum(other > value for other in others) >= kept
