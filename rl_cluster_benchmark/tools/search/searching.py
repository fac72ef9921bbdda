"""The course of a search: trials are taken, trained, judged and saved, several at a time, until there are enough."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.search import search_report
from rl_cluster_benchmark.tools.search.sampling import require_optuna, suggest
from rl_cluster_benchmark.tools.search.search_space import SearchSpace
from rl_cluster_benchmark.tools.search.search_trials import RunningTrial
from rl_cluster_benchmark.tools.search.study import Study, Trial

SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_BETWEEN_READINGS_OF_OTHERS = 10.0  # of what other processes have done
FAILURES_AT_THE_START = 5  # in a row, after which a search ends
SAMPLES = 20  # of the space, of which one at least must be a config


@dataclass(frozen=True)
class SearchSettings:
    directory: Path
    trials: int | None  # in the whole study
    seconds: float | None  # after which no trial begins that would not be done
    jobs: int


def search(space: SearchSpace | None, settings: SearchSettings, signals: Signals) -> int:
    """Work on the study in the directory until it has its trials or the time is over; return the exit status."""
    require_optuna()
    if space is not None:
        check_buildable(space)
    search_report.check_replaceable(settings.directory)
    study = Study.open(settings.directory, space)
    course = SearchRun(study, settings, signals)
    try:
        course.work()
    finally:
        course.end()
    with study.locked():
        lines = search_report.write(study)
    print("\n".join(lines), flush=True)
    if signals.has_come():
        where = shlex.quote(str(settings.directory))
        print(f"Interrupted. The same command goes on, or: rlcb search --output-dir {where}{_limits(settings)}")
        return signals.status
    if course.failed_at_the_start is not None:
        raise TrainingFailedError(
            f"The first {FAILURES_AT_THE_START} trials failed, and the search has ended; the last one: "
            f"{course.failed_at_the_start}"
        )
    return 0


def _limits(settings: SearchSettings) -> str:
    trials = f" --trials {settings.trials}" if settings.trials is not None else ""
    hours = f" --budget {settings.seconds / 3600:g}" if settings.seconds is not None else ""
    return trials + hours + (f" --jobs {settings.jobs}" if settings.jobs > 1 else "")


def check_buildable(space: SearchSpace) -> None:
    """Refuse a space of which no trial could be trained: its fixed settings do not go together."""
    problems = []
    for number in range(len(space.candidates) + SAMPLES):
        try:
            config = space.config_of(suggest(space, number, []))
        except UserError as error:
            problems.append(str(error))
            continue
        _check_environments(config)
        return
    raise UserError(f"No trial of this space can be trained; the first one: {problems[0]}")


def _check_environments(config: Config) -> None:
    """Refuse trials whose number of environments would follow from the cores that they get, as with other --jobs."""
    share = config.parallel.num_envs_per_worker
    actors = config.impala.num_actors if config.traits.has_actors else None
    workers = actors or config.parallel.num_workers
    if config.is_parallel and share is not None and not isinstance(workers, int):
        raise UserError(
            f"With parallel.num_envs_per_worker = {share} and no number of workers, the environments of a trial would "
            "depend on its cores; set parallel.num_workers, or env.num_envs and parallel.num_envs_per_worker: null."
        )


def core_shares(slots: int) -> list[Collection[int] | None]:
    """Return equal shares of the physical cores for so many runs side by side; with too few cores, runs share one."""
    cores = detection.detect().physical_cores
    if slots == 1:
        return [None]
    if slots > len(cores):
        return [[cores[slot % len(cores)]] for slot in range(slots)]
    return [cores[slot * len(cores) // slots : (slot + 1) * len(cores) // slots] for slot in range(slots)]


class SearchRun:
    def __init__(self, study: Study, settings: SearchSettings, signals: Signals) -> None:
        self.study, self.settings, self.signals = study, settings, signals
        self.started = time.monotonic()
        self.progress = SearchProgress(study.trials(), settings.trials, settings.seconds, settings.jobs)
        runs = len(study.space.runs())
        shares = core_shares(settings.jobs * runs)
        self._free = [shares[job * runs : (job + 1) * runs] for job in range(settings.jobs)]
        self.running: list[RunningTrial] = []
        self._failures: list[str] = []  # of this call
        self.failed_at_the_start: str | None = None

    def work(self) -> None:
        """Train trials until there are enough, the time is over, the first ones all fail, or somebody asks to end."""
        while not self.signals.has_come() and self.failed_at_the_start is None:
            self._begin_trials()
            if not self.running:
                return
            for trial in list(self.running):
                if not self.signals.has_come() and trial.look():
                    self._ended(trial)
            self.progress.show(self.study.trials, [trial.fraction() for trial in self.running])
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def end(self) -> None:
        """End what is running, in good order; these trials are trained anew by whoever takes them next."""
        for trial in self.running:
            trial.ask_to_end()
        try:
            while not all(trial.has_ended() for trial in self.running):
                time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            for trial in self.running:
                trial.kill()
                trial.claim.release()
            self.progress.close()

    def _begin_trials(self) -> None:
        while self._free and self._is_time_left():
            claim = self.study.take(self.settings.trials, suggest)
            if claim is None:
                return
            again = ", which was left unfinished, anew" if claim.was_left else ""
            self.progress.say(f"Trial {claim.trial.number}{again}: {search_report.settings_of(claim.trial)}")
            self.running.append(RunningTrial(self.study, claim, self._free.pop(), self.progress.say))

    def _ended(self, ended: RunningTrial) -> None:
        self.running.remove(ended)
        self._free.append(list(ended.shares))
        ended.claim.release()
        trials = self.study.trials()
        self.progress.say(search_report.sentence(ended.trial, self.study.space))
        self.progress.update(trials)
        with self.study.locked():
            search_report.write_tables(self.study)
        if ended.trial.state == "failed":
            self._failures.append(ended.trial.reason or "")
        some_worked = any(trial.state in ("complete", "pruned") for trial in trials)
        if len(self._failures) >= FAILURES_AT_THE_START and not some_worked:
            self.failed_at_the_start = self._failures[-1]

    def _is_time_left(self) -> bool:
        """Return whether another trial may begin: one that takes as long as the longest so far must fit."""
        if self.settings.seconds is None:
            return True
        longest = max((trial.seconds for trial in self.progress.trials), default=0.0)
        return time.monotonic() - self.started + longest <= self.settings.seconds


class SearchProgress:
    """A bar on a terminal, a plain line for each trial elsewhere: trials done, the best so far, the time left.

    `limit` and `seconds` end the search, if they are given.
    """

    def __init__(self, trials: Sequence[Trial], limit: int | None, seconds: float | None, jobs: int) -> None:
        self.limit, self.seconds, self.jobs = limit, seconds, jobs
        self.started = self._looked = time.monotonic()
        self._bar: tqdm | None = None
        if sys.stderr is not None and sys.stderr.isatty():
            form = "{desc}{percentage:3.0f}%|{bar}|{postfix}" if limit is not None else "{desc}{postfix}"
            self._bar = tqdm(total=limit, bar_format=form, dynamic_ncols=True, desc="Search")
        self.update(trials)

    def update(self, trials: Sequence[Trial], fractions: Sequence[float] = ()) -> None:
        """Take in how the trials stand; `fractions` tells how much of those in hand is done."""
        self.trials = list(trials)
        if self._bar is not None:
            done = sum(trial.state != "running" for trial in trials)
            self._bar.n = min(done + sum(fractions), self.limit) if self.limit is not None else done
            self._bar.set_postfix_str(self.status(fractions))

    def show(self, trials: Callable[[], Sequence[Trial]], fractions: Sequence[float]) -> None:
        """Draw the bar again now and then."""
        if self._bar is not None and time.monotonic() - self._looked >= SECONDS_BETWEEN_READINGS_OF_OTHERS:
            self._looked = time.monotonic()
            self.update(trials(), fractions)

    def say(self, line: str) -> None:
        """Print a line about a trial, above the bar if there is one."""
        with contextlib.suppress(OSError, ValueError):  # the reader of our output is gone; the search goes on
            if self._bar is not None:
                self._bar.write(line)
            else:
                print(line, flush=True)

    def status(self, fractions: Sequence[float] = ()) -> str:
        done = sum(trial.state != "running" for trial in self.trials)
        of = f" of {self.limit}" if self.limit is not None else ""
        best = max((trial for trial in self.trials if trial.score is not None), key=_score, default=None)
        parts = [f"{done}{of} trials done"]
        parts.append(f"best {best.score:.3f} (trial {best.number})" if best is not None else "no score yet")
        left = self.seconds_left(done + sum(fractions))
        if left:
            parts.append(f"about {text.duration(left)} left")
        return ", ".join(parts)

    def seconds_left(self, done: float) -> float | None:
        """Return the time until the trials are done, from what those before took, or until the budget is over."""
        left = []
        taken = [trial.seconds for trial in self.trials if trial.state in ("complete", "pruned")]
        if self.limit is not None and taken:
            left.append(max(0.0, self.limit - done) * sum(taken) / len(taken) / self.jobs)
        if self.seconds is not None:
            left.append(max(0.0, self.seconds - (time.monotonic() - self.started)))
        return min(left) if left else None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _score(trial: Trial) -> float:
    return trial.score if trial.score is not None else float("-inf")
