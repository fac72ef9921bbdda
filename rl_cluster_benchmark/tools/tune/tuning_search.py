"""Which settings to try next: group by group around the best so far, then again and again among the best few.

Timings are noisy. What is dropped early is clearly slower; what is close is measured several times, in turns, so that
a machine that gets slower or faster meanwhile favours nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from rl_cluster_benchmark.tools.tune.tuning_space import GROUPS, TuningSetting, TuningSpace
from rl_cluster_benchmark.tools.tune.tuning_trials import TuningTrial

NEAR = 0.85  # of the best one's speed: what is slower is not looked at again
WIDTHS = (1, 2, 3)  # of the best so far, whose neighbours are tried
FINALS = (5, 4, 3, 2)  # how many of the best take part in each further round
ALIKE = 0.01  # settings that differ by less are equal: the one nearest to the config is taken
ROUNDS_IN_TURNS, RIVALS = 3, 2


class Runner(Protocol):
    tried: dict[TuningSetting, TuningTrial]

    def affordable(self, until: float | None = None) -> bool: ...

    def run(self, setting: TuningSetting) -> TuningTrial: ...


def search(space: TuningSpace, trials: Runner, say: Callable[[TuningTrial], None], *, finals_at: float) -> None:
    """Try settings until all is done or the time is up; `finals_at` is when the final rounds begin at the latest.

    What they leave of the time goes to settings that there was no time for before.
    """
    say(trials.run(space.default))
    until: float | None = finals_at
    while True:
        before = len(trials.tried)
        _explore(space, trials, say, until)
        if len(trials.tried) == before and until is None:
            return
        if len(trials.tried) > 1 or len(space.settings) == 1:
            _finals(space, trials, say)
        until = None


def _explore(space: TuningSpace, trials: Runner, say: Callable[[TuningTrial], None], until: float | None) -> None:
    """Group by group, what has not been tried around the best so far; then also around those that come near it."""
    for width in WIDTHS:
        for group in GROUPS:
            near = [space.variants(trial.setting, group) for trial in fastest(trials, width)]
            for setting in dict.fromkeys(setting for variants in near for setting in variants):
                if setting not in trials.tried and trials.affordable(until):
                    say(trials.run(setting))


def _finals(space: TuningSpace, trials: Runner, say: Callable[[TuningTrial], None]) -> None:
    """Measure the best few again, and the config as it is, in turns; in each round fewer."""
    for number, size in enumerate(FINALS):
        finalists = [trial.setting for trial in fastest(trials, size)]
        if len(finalists) < 2 and number > 0:
            return  # nothing comes near it, and the comparison with the config as it is has been repeated
        if space.default not in finalists and trials.tried[space.default].rates:
            finalists.append(space.default)
        for setting in finalists if number % 2 == 0 else reversed(finalists):
            if trials.affordable():
                say(trials.run(setting))


def fastest(trials: Runner, count: int) -> list[TuningTrial]:
    """Return the best trial, and up to `count` in all that come near it."""
    ranked = sorted((t for t in trials.tried.values() if t.rates), key=lambda trial: -trial.fps)
    return [trial for trial in ranked[:count] if trial.fps >= NEAR * ranked[0].fps]


def choose(space: TuningSpace, tried: Sequence[TuningTrial]) -> TuningTrial | None:
    """Return the fastest of the trials measured most often; of equal ones the one that changes least."""
    measured = [trial for trial in tried if trial.rates]
    if not measured:
        return None
    most = max(len(trial.rates) for trial in measured)
    pool = [trial for trial in measured if len(trial.rates) >= max(1, most - 1)]
    best = max(trial.fps for trial in pool)
    equals = [trial for trial in pool if trial.fps >= (1 - ALIKE) * best]
    return min(equals, key=lambda trial: (_differences(trial.setting, space.default), -trial.fps))


def _differences(setting: TuningSetting, default: TuningSetting) -> int:
    names = ("layout", "precision", "engine", "micro_batch", "balance")
    return sum(getattr(setting, name) != getattr(default, name) for name in names)


def sweep(
    space: TuningSpace, trials: Runner, say: Callable[[TuningTrial], None], chosen: TuningSetting
) -> dict[TuningSetting, list[float]]:
    """Measure the whole space once in random order, then the best of it in turns with the chosen setting.

    The best of many noisy figures is lucky: only a comparison in turns says how much faster it is.
    """
    order = list(space.settings)
    random.Random(0).shuffle(order)

    def speed(setting: TuningSetting) -> float:
        before = len(trials.tried[setting].rates) if setting in trials.tried else 0
        trial = trials.run(setting)
        say(trial)
        return trial.rates[-1].fps if len(trial.rates) > before else 0.0

    swept = {setting: speed(setting) for setting in order}
    rivals = sorted((s for s in swept if s != chosen), key=lambda s: -swept[s])[:RIVALS]
    in_turns: dict[TuningSetting, list[float]] = {setting: [] for setting in (chosen, *rivals)}
    for number in range(ROUNDS_IN_TURNS):
        for setting in in_turns if number % 2 == 0 else reversed(in_turns):
            in_turns[setting].append(speed(setting))
    return in_turns


def of_best(in_turns: dict[TuningSetting, list[float]], chosen: TuningSetting) -> float:
    """Return the chosen setting's speed as a share of the best one's, medians of the rounds in turns."""
    speeds = {setting: median(found) for setting, found in in_turns.items()}
    return speeds[chosen] / max(speeds.values())
