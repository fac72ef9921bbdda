"""A trial: `rlcb train` with one setting in a process of its own, measured for some seconds after its first update."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.tools.scaling.cases import MEASURED
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate, measure
from rl_cluster_benchmark.tools.tune.tuning_space import TuningSetting, TuningSpace

SAMPLES_PER_UPDATE = 2048  # at least, where rollouts can be shortened: what belongs to an update alone stays small
PATIENCE = 2.5  # times the fastest trial's time, start included, after which a trial is given up


def short_updates(config: Config) -> Config:
    """Return a config with the same work in shorter updates: PPO with shorter rollouts and the same minibatches."""
    if not config.traits.has_minibatches:
        return config  # the rollout is the batch
    smallest = config.batch_size // math.gcd(config.batch_size, config.env.num_envs)
    times = max(1, math.ceil(SAMPLES_PER_UPDATE / (smallest * config.env.num_envs)))
    n_steps = min(config.training.n_steps, smallest * times)
    return config_files.with_changes(config, {"training.n_steps": n_steps}, source="trial")


@dataclass
class TuningTrial:
    """A setting, and what was seen of it."""

    setting: TuningSetting
    rates: list[Rate] = field(default_factory=list)
    problem: str | None = None  # why it has none

    @property
    def fps(self) -> float:
        return median(rate.fps for rate in self.rates) if self.rates else 0.0

    @property
    def spread(self) -> float:
        """Return half of the range, as a share of the median."""
        speeds = [rate.fps for rate in self.rates]
        return (max(speeds) - min(speeds)) / 2 / self.fps if self.rates else 0.0


class Trials:
    """The trials of a search: it runs them, keeps them, and knows how much time is left."""

    def __init__(
        self, space: TuningSpace, folder: Path, *, seconds: float, deadline: float, interrupted: Callable[[], bool]
    ) -> None:
        """Run trials until `deadline`, by time.monotonic(): no trial goes on beyond it."""
        self.space, self.folder, self.seconds, self.deadline = space, folder, seconds, deadline
        self.interrupted = interrupted
        self.tried: dict[TuningSetting, TuningTrial] = {}
        self._durations: list[float] = []  # of whole trials
        self._count = 0

    def affordable(self, until: float | None = None) -> bool:
        """Return whether there is time for one more trial, by what they have taken."""
        expected = median(self._durations) if self._durations else 0.0
        return time.monotonic() + 1.2 * expected < (until or self.deadline)

    def run(self, setting: TuningSetting) -> TuningTrial:
        """Run a setting once more; one that fails or dawdles is not fatal.

        Raise KeyboardInterrupt when somebody asks to end.
        """
        trial = self.tried.setdefault(setting, TuningTrial(setting))
        trial.problem = None
        started = time.monotonic()
        give_up = started + PATIENCE * min(self._durations) if self._durations else math.inf
        give_up = min(give_up, self.deadline)
        self._count += 1
        place = self.folder / str(self._count)
        cores = [os.sched_getaffinity(0)]  # the run pins its workers itself
        config = short_updates(self.space.tuned(setting))
        config = config_files.with_changes(config, MEASURED, source="trial")

        def ended() -> bool:
            return self.interrupted() or time.monotonic() > give_up

        try:
            trial.rates += measure([config], cores, place, seconds=self.seconds, interrupted=ended)
            self._durations.append(time.monotonic() - started)
        except KeyboardInterrupt:
            if self.interrupted():
                raise
            took = time.monotonic() - started
            why = "the time was up" if time.monotonic() >= self.deadline else "much slower than the others"
            trial.problem = f"stopped after {took:.0f} s: {why}"
        except (UserError, TrainingFailedError) as error:
            if setting == self.space.default and not trial.rates:
                raise  # the config itself does not run
            trial.problem = str(error).splitlines()[0]
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return trial
