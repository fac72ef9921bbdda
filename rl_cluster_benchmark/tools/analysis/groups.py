"""Runs that differ by their seed alone are one group: one variant (algorithm, mode, settings) on one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import EnvConfig
from rl_cluster_benchmark.env import published
from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis import statistics
from rl_cluster_benchmark.tools.analysis.runs import RunRecord
from rl_cluster_benchmark.tools.analysis.statistics import Estimate

NOT_OF_THE_TASK = ("num_envs", "seed")  # of the section env; all else there is the task
NOT_OF_THE_VARIANT = (
    "algorithm", "mode", "output_dir", "logging", "env.seed",
    # where machines meet, and what becomes of a run that fails, is no part of what it learns or how fast
    "cluster.master_addr", "cluster.master_port", "cluster.interface", "cluster.timeout", "cluster.join_timeout",
    "cluster.max_restarts", "cluster.min_nodes", "cluster.shared_filesystem", "impala.max_actor_restarts",
    "training.watchdog", "training.log_interval", "training.save_interval",
)  # fmt: skip
MEASURED_SPLIT = ("parallel.num_workers", "impala.num_learners")  # differs from run to run when nobody has chosen it
CHANGED_SETTINGS = {  # what a summary says of the parts of a run -> the settings that decide it
    "num_workers": ("parallel.num_workers", "impala.num_actors"), "num_learners": ("impala.num_learners",),
    "precision": ("hardware.precision",), "engine": ("hardware.engine",),
}  # fmt: skip
WORK = (  # how much there is of it in a step
    "model.", "training.n_steps", "training.batch_size", "training.n_epochs", "training.target_kl", "impala.passes",
    "impala.replay", "env.num_envs", "hardware.precision",
)  # fmt: skip
SHOWN_DIFFERENCES = 2

Metric = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class LearningTask:
    """What is to be learned: a game, its difficulty, its levels."""

    env: EnvConfig

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(v for k, v in self.env.model_dump().items() if k not in NOT_OF_THE_TASK)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LearningTask) and self.key == other.key

    @property
    def game(self) -> str:
        return self.env.game or self.env.name

    @property
    def holds_levels_back(self) -> bool:
        """Return whether there are levels that training never shows."""
        return self.env.game is not None and self.env.num_levels > 0

    def __str__(self) -> str:
        if self.env.game is None:
            return self.env.name
        levels = f"{self.env.num_levels:,} levels" if self.env.num_levels else "all levels"
        if self.env.distribution_mode == "exploration":
            levels = "its one level"
        others = "".join(f", {key} {_value(value)}" for key, value in published.changed_settings(self.env).items())
        return f"{self.game} ({self.env.distribution_mode}, {levels}{others})"


@dataclass(frozen=True)
class Group:
    """Runs of one variant on one task that differ by their seeds alone."""

    variant: str
    task: LearningTask
    runs: tuple[RunRecord, ...]  # in order of their seeds, each seed once

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    @property
    def mode(self) -> str:
        return self.runs[0].mode

    def values(self, metric: Metric) -> list[float]:
        return [value for run in self.runs if (value := metric(run)) is not None]

    def estimate(self, metric: Metric) -> Estimate | None:
        """Return the mean over seeds and its interval, or None unless all seeds have it and acted alike."""
        values = self.values(metric)
        if len(values) < len(self.runs) or ways_of_acting(self.runs, *LEVELS_OF.get(metric, ())) > 1:
            return None
        estimate = statistics.mean(values)
        if metric in NEVER_NEGATIVE and estimate.interval is not None:
            return Estimate(estimate.value, (max(0.0, estimate.interval[0]), estimate.interval[1]))
        return estimate


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Return the groups in order of tasks, then of algorithms and modes as they come."""
    labels = _variant_labels(runs)
    members: dict[tuple[str, LearningTask], list[RunRecord]] = {}
    for run, label in zip(runs, labels, strict=True):
        members.setdefault((label, LearningTask(run.config.env)), []).append(run)
    tasks = list(dict.fromkeys(LearningTask(run.config.env) for run in sorted(runs, key=lambda run: run.game)))
    groups = [Group(label, task, tuple(sorted(m, key=lambda r: r.seed))) for (label, task), m in members.items()]
    return sorted(groups, key=lambda group: tasks.index(group.task))


def _variant_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run's variant: `PPO parallel`, or `PPO parallel (num_workers 4)` where settings differ."""
    settings = [_settings(run) for run in runs]
    names = [f"{run.algorithm} {run.mode}" for run in runs]
    labels, seen = [], set()
    taken: dict[str, tuple[tuple[str, str], ...]] = {}
    for run, mine, name in zip(runs, settings, names, strict=True):
        others = [s for s, n in zip(settings, names, strict=True) if n == name]
        differing = [key for key in mine if any(other.get(key) != mine[key] for other in others)]
        label = name
        if differing:
            shown = [f"{key.rpartition('.')[2]} {mine[key]}" for key in differing[:SHOWN_DIFFERENCES]]
            more = len(differing) - len(shown)
            label += f" ({', '.join(shown)}{f' and {more} more' if more else ''})"
        numbers = [*map(str, range(2, len(runs) + 1))]
        label = next(
            text
            for text in (label, *(f"{label} setting {number}" for number in numbers))
            if taken.setdefault(text, tuple(mine.items())) == tuple(mine.items())
        )
        place = (LearningTask(run.config.env), run.seed)  # the same seed twice is no second seed
        repeats = (label, *(f"{label} repeat {number}" for number in numbers))
        label = next(text for text in repeats if (text, place) not in seen)
        seen.add((label, place))
        labels.append(label)
    return labels


def _settings(run: RunRecord) -> dict[str, str]:
    flat: dict[str, str] = {}
    for section, content in configs.recorded(run.config).items():
        entries = content.items() if isinstance(content, dict) else [("", content)]
        for key, value in entries:
            name = f"{section}.{key}" if key else section
            is_task = section == "env" and key not in NOT_OF_THE_TASK
            if section not in NOT_OF_THE_VARIANT and name not in NOT_OF_THE_VARIANT and not is_task:
                flat[name] = _value(value)
    for name, values in run.summary.changes.items():  # of a run that was resumed with other settings
        for key in CHANGED_SETTINGS.get(name, ()):
            if key in flat:
                flat[key] = values
    if flat.get("impala.split") == "measured":
        for name in MEASURED_SPLIT:
            flat.pop(name, None)
    return flat


def other_work(one: RunRecord, other: RunRecord) -> list[str]:
    """Return the settings that differ between two runs of one algorithm and change how much work a step is."""
    mine, theirs = _settings(one), _settings(other)
    return [key for key in mine if key.startswith(WORK) and mine[key] != theirs.get(key, mine[key])]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


# Figures of a run


def in_summary(name: str) -> Metric:
    """Return the figure that stands under this name in a run's summary."""
    return attrgetter(f"summary.{name}")


def in_evaluation(levels: str, name: str = "mean_reward") -> Metric:
    """Return the figure that stands under this name in a run's evaluation on these levels."""

    def figure(run: RunRecord) -> float | None:
        return getattr(run.evaluations[levels], name) if levels in run.evaluations else None

    return figure


fps, steps, memory = in_summary("avg_fps"), in_summary("total_timesteps"), in_summary("peak_memory_gb")
final_reward, best_reward = in_summary("final_reward"), in_summary("best_reward")
NEVER_NEGATIVE = (fps, memory, steps)
# The levels of an evaluation: those of training, those never trained on, and all, as the published test has them.
LEVELS = {"train": "training levels", "test": "unseen levels", "all": "all levels"}
EVALUATED = {levels: in_evaluation(levels) for levels in LEVELS}
train_reward, test_reward, all_reward = EVALUATED.values()


def machines(runs: Iterable[RunRecord]) -> list[tuple[str, int | None]]:
    """Return (CPU, usable cores) of each machine that the runs name; those that name none count as one more.

    A run that was killed names none. Where no run names any, nothing is known, and nothing is returned.
    """
    seen = list(dict.fromkeys((run.summary.cpu_model, run.summary.usable_cores) for run in runs))
    named = [(model, cores) for model, cores in seen if model]
    return [*named, ("an unnamed machine", None)] if named and any(not model for model, _ in seen) else named


def speeds_compare(runs: Sequence[RunRecord]) -> bool:
    """Return whether the runs are of one machine, and each was trained under the same conditions throughout."""
    return len(machines(runs)) < 2 and not any(run.summary.changes for run in runs)


def processes(run: RunRecord) -> int | None:
    """Return how many processes trained, IMPALA's learners among them; None where the run does not say."""
    workers, learners = run.summary.num_workers, run.summary.num_learners
    if run.config.is_sequential:
        return 1
    if run.summary.changes.keys() & {"num_workers", "num_learners"}:
        return None
    if workers is None or (learners is None and run.config.traits.has_actors):
        return None
    return workers + (learners or 0)


def ways_of_acting(runs: Iterable[RunRecord], *levels: str) -> int:
    """Return 2 if some of the runs' evaluations on these levels sampled actions and others took the likeliest ones."""
    found = [run.evaluations[name] for run in runs for name in levels if name in run.evaluations]
    return len({evaluation.deterministic for evaluation in found})


def gap(run: RunRecord) -> float | None:
    """Return how much better the agent plays levels it was trained on than levels never trained on."""
    train, test = train_reward(run), test_reward(run)
    return train - test if train is not None and test is not None else None


LEVELS_OF: dict[Metric, tuple[str, ...]] = {
    train_reward: ("train",), test_reward: ("test",), all_reward: ("all",), gap: ("train", "test"),
}  # fmt: skip
"""The levels whose evaluations a figure is of."""


def reached(run: RunRecord, threshold: float) -> tuple[float, float] | None:
    """Return (steps, seconds) after which the mean of the last 100 episodes was first at the threshold."""
    rewards, episodes = run.series.get("charts/episodic_return"), run.series.get("charts/episodes")
    if rewards is None or episodes is None:
        return None
    there = np.flatnonzero((rewards >= threshold) & (episodes >= WINDOW))
    return (float(run.series["step"][there[0]]), float(run.series["time"][there[0]])) if len(there) else None


def published_until(env: EnvConfig, step: float) -> list[published.CurvePoint]:
    """Return the points of the published curve that lie within a picture of a run of so many steps."""
    return [point for point in published.curve(env) if point.step <= 1.3 * step]


def published_reward(task: LearningTask, at_step: float, split: str = "train") -> float | None:
    """Return what the published PPO had reached after as many steps; None outside of its curve."""
    points = published.curve(task.env, split)
    if not points or not points[0].step <= at_step <= points[-1].step:
        return None
    return float(np.interp(at_step, [p.step for p in points], [p.mean for p in points]))
