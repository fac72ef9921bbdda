"""The course of a search: trials are taken, trained, judged and saved, several at a time, until there are enough."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.search import search_report
from rl_cluster_benchmark.tools.search.sampling import require_optuna, suggest
from rl_cluster_benchmark.tools.search.search_progress import SearchProgress
from rl_cluster_benchmark.tools.search.search_space import SearchSpace
from rl_cluster_benchmark.tools.search.search_trials import TrialInHand
from rl_cluster_benchmark.tools.search.study import Study

SECONDS_BETWEEN_LOOKS = 0.25
FAILURES_AT_THE_START = 5  # in a row, after which a search ends
SAMPLES = 20  # of the space, of which one at least must be a config


@dataclass(frozen=True)
class SearchSettings:
    directory: Path
    trials: int | None  # in the whole study
    seconds: float | None  # after which no trial begins that would not be done
    jobs: int


def search(space: SearchSpace | None, settings: SearchSettings, signals: Signals) -> int:
    """Work on the study in the directory until it has its trials or the time is over; returns the exit status."""
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
    if signals.received is not None:
        where = shlex.quote(str(settings.directory))
        print(f"Interrupted. The same command goes on, or: rlcb search --output-dir {where}{_limits(settings)}")
        return 128 + signals.received
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
    actors = config.impala.num_actors if config.algorithm == "impala" else None
    workers = actors or config.parallel.num_workers
    if config.mode == "parallel" and share is not None and not isinstance(workers, int):
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
        self.in_hand: list[TrialInHand] = []
        self._failures: list[str] = []  # of this call
        self.failed_at_the_start: str | None = None

    def work(self) -> None:
        """Train trials until there are enough, the time is over, the first ones all fail, or somebody asks to end."""
        while self.signals.received is None and self.failed_at_the_start is None:
            self._begin_trials()
            if not self.in_hand:
                return
            for hand in list(self.in_hand):
                if self.signals.received is None and hand.look():
                    self._ended(hand)
            self.progress.show(self.study.trials, [hand.fraction() for hand in self.in_hand])
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def end(self) -> None:
        """End what is in hand, in good order; these trials are trained anew by whoever takes them next."""
        for hand in self.in_hand:
            hand.ask_to_end()
        try:
            while not all(hand.has_ended() for hand in self.in_hand):
                time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            for hand in self.in_hand:
                hand.kill()
                hand.claim.release()
            self.progress.close()

    def _begin_trials(self) -> None:
        while self._free and self._is_time_left():
            claim = self.study.take(self.settings.trials, suggest)
            if claim is None:
                return
            again = ", which was left unfinished, anew" if claim.was_left else ""
            self.progress.say(f"Trial {claim.trial.number}{again}: {search_report.settings_of(claim.trial)}")
            self.in_hand.append(TrialInHand(self.study, claim, self._free.pop(), self.progress.say))

    def _ended(self, hand: TrialInHand) -> None:
        self.in_hand.remove(hand)
        self._free.append(list(hand.shares))
        hand.claim.release()
        trials = self.study.trials()
        self.progress.say(search_report.sentence(hand.trial, self.study.space))
        self.progress.update(trials)
        with self.study.locked():
            search_report.write_tables(self.study)
        if hand.trial.state == "failed":
            self._failures.append(hand.trial.reason or "")
        some_worked = any(trial.state in ("complete", "pruned") for trial in trials)
        if len(self._failures) >= FAILURES_AT_THE_START and not some_worked:
            self.failed_at_the_start = self._failures[-1]

    def _is_time_left(self) -> bool:
        """Return whether another trial may begin: one that takes as long as the longest so far must fit."""
        if self.settings.seconds is None:
            return True
        longest = max((trial.seconds for trial in self.progress.trials), default=0.0)
        return time.monotonic() - self.started + longest <= self.settings.seconds
