"""The course of `rlcb tune`: the space, the search within its time, the table and the files."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Interrupted, Signals
from rl_cluster_benchmark.machine import detection, process
from rl_cluster_benchmark.tools.scaling.results_folder import results_folder
from rl_cluster_benchmark.tools.tune import tuning_report
from rl_cluster_benchmark.tools.tune.tuning_search import choose, of_best, search, sweep
from rl_cluster_benchmark.tools.tune.tuning_space import KEYS, TuningSetting, TuningSpace, resolve_envs, value_of
from rl_cluster_benchmark.tools.tune.tuning_trials import Trials, TuningTrial, short_updates

SEARCH_SHARE = 0.7  # of the time; the rest is for measuring the best few again
ENDING_SECONDS = 2.0  # of the budget, for a trial to be killed and the files to be written


@dataclass(frozen=True)
class TuningSettings:
    budget: float  # seconds for everything but an exhaustive sweep
    seconds: float  # of each trial after its first update
    output_dir: Path
    overwrite: bool
    exhaustive: bool = False
    learning_too: bool = False
    given: Collection[str] = field(default=())  # keys on the command line


def tune(config: Config, settings: TuningSettings, signals: Signals) -> int:
    """Search, print and write; return the exit status."""
    started = time.monotonic()
    try:
        space = make_space(config, settings, signals.check)
    except Interrupted:
        print("Interrupted before anything was measured: no file is written.", flush=True)
        return signals.status
    files = (tuning_report.YAML, tuning_report.JSON)
    with results_folder(settings.output_dir, files, overwrite=settings.overwrite, what="a tuned config") as folder:
        print("\n".join(_header(space, settings)), flush=True)
        trials = Trials(
            space, folder, seconds=settings.seconds, deadline=started + settings.budget - ENDING_SECONDS,
            interrupted=signals.has_come,
        )  # fmt: skip
        course = TuningRun(space, settings, trials, started)
        with contextlib.suppress(KeyboardInterrupt):
            course.search()
            if settings.exhaustive:
                course.check()
        if signals.has_come() and course.chosen is None:
            print("Interrupted before anything was measured: no file is written.", flush=True)
        else:
            course.show()
    return signals.status


def make_space(config: Config, settings: TuningSettings, look: Callable[[], None] = lambda: None) -> TuningSpace:
    if config.is_distributed:
        raise UserError(
            "rlcb tune measures one machine; tune with --mode parallel and use the result on every machine."
        )
    if config.hardware.device != "cpu":
        raise UserError(f"rlcb tune is about CPUs, and hardware.device = {config.hardware.device}; use cpu.")
    fixed = {key for key in KEYS if key in settings.given and value_of(config, key) not in (None, "auto")}
    if "impala.num_actors" in fixed:
        fixed = fixed - {"impala.num_actors"} | {"parallel.num_workers"}  # where the split is filled in
    process.prepare_process(1)
    if config.traits.has_actors and config.is_parallel:
        from rl_cluster_benchmark.execution.actor_learner.split import fill_in

        config = fill_in(config, look)
    machine = detection.detect()
    return TuningSpace(resolve_envs(config, machine), machine, fixed=fixed, learning_too=settings.learning_too)


class TuningRun:
    """A search for the fastest setting, and what it has found so far."""

    def __init__(self, space: TuningSpace, settings: TuningSettings, trials: Trials, started: float) -> None:
        self.space, self.settings, self.trials, self.started = space, settings, trials, started
        self.checked: dict[str, Any] = {}

    @property
    def chosen(self) -> TuningTrial | None:
        return choose(self.space, list(self.trials.tried.values()))

    def search(self) -> None:
        self.choice: TuningSetting | None = None
        search(
            self.space, self.trials, self._say,
            finals_at=self.started + SEARCH_SHARE * self.settings.budget,
        )  # fmt: skip
        if (chosen := self.chosen) is not None:
            self.choice = chosen.setting
            self.checked["search_seconds"] = time.monotonic() - self.started

    def check(self) -> None:
        """Measure all there is, and compare the best of it with the choice of the search."""
        if self.choice is None:
            return
        count = len(self.space.settings)
        print(
            f"\nThe search chose: {tuning_report.name(self.choice)}. Now all {count} settings, to check it:", flush=True
        )
        self.trials.deadline = math.inf
        in_turns = sweep(self.space, self.trials, self._say, self.choice)
        share = of_best(in_turns, self.choice)
        self.checked |= {
            "choice_of_best": share,
            "duel": {tuning_report.name(setting): speeds for setting, speeds in in_turns.items()},
        }

    def show(self) -> None:
        """Print and write what has been measured, if anything has."""
        tried = list(self.trials.tried.values())
        chosen = self.trials.tried[self.choice] if self.choice is not None else self.chosen
        if chosen is None:
            problem = next(trial.problem for trial in tried if trial.problem)
            raise TrainingFailedError(
                f"Nothing was measured ({problem}): no file is written. A larger --budget, fewer --num-envs or a "
                "smaller training.n_steps would let a trial end."
            )
        print("", *tuning_report.result_table(self.space, tried, chosen.setting), sep="\n")
        print("", tuning_report.LEGEND, "", *tuning_report.sentences(self.space, tried, chosen), sep="\n")
        if lines := tuning_report.what_it_brings(self.space, tried, chosen):
            print("", "What each choice brings, all else equal:", *lines, sep="\n")
        if "choice_of_best" in self.checked:
            print(
                f"\nChecked against all {len(self.space.settings)} settings: the choice of the search makes "
                f"{self.checked['choice_of_best']:.1%} of the best one's speed (in turns, medians)."
            )
        tuning_report.write_files(self.settings.output_dir, self.space, tried, chosen, self.checked)
        place = self.settings.output_dir / tuning_report.YAML
        print(f"\nSaved {place} and {self.settings.output_dir / tuning_report.JSON}")
        print(f"Use it: rlcb train --config {place} --output-dir runs/tuned", flush=True)

    def _say(self, trial: TuningTrial) -> None:
        took = time.monotonic() - self.started
        what = trial.problem if trial.problem or not trial.rates else f"{trial.rates[-1].fps:8,.0f} steps/s"
        print(f"[{took:4.0f} s] {what}  {tuning_report.name(trial.setting)}", flush=True)


def _header(space: TuningSpace, settings: TuningSettings) -> list[str]:
    config = space.config
    steps = short_updates(config).training.n_steps
    shorter = f"; rollouts of {steps} steps instead of {config.training.n_steps}, the same minibatches"
    return [
        f"Tuning {config.traits.label} on {config.env.name}: {len(space.settings)} settings, "
        f"{settings.budget:g} s" + (", then all of them" if settings.exhaustive else ""),
        f"CPU: {detection.detect()}",
        f"Each trial: {settings.seconds:g} s (at least an update) after the first update"
        + (shorter if steps != config.training.n_steps else ""),
        f"As it is: {tuning_report.name(space.default)}",
    ]
