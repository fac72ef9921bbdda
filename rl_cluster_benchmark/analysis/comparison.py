"""Several runs side by side: groups, thresholds, normalised scores, and what may be said about who is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_cluster_benchmark.analysis import groups as figures
from rl_cluster_benchmark.analysis import published, statistics
from rl_cluster_benchmark.analysis.groups import Group, Metric, Task, group_runs
from rl_cluster_benchmark.analysis.runs import LeftOut, RunRecord, load_runs
from rl_cluster_benchmark.analysis.statistics import Estimate
from rl_cluster_benchmark.errors import UserError

BASES: tuple[tuple[str, str, Metric], ...] = (
    ("test", "evaluation on unseen levels", figures.test_reward),
    ("train", "evaluation on training levels", figures.train_reward),
    ("training", "last 100 episodes of training", figures.final_reward),
)

SEEDS_FOR_A_WINNER = 3  # with two, a bootstrap names a winner among equals in 8 to 38 of 100 cases (docs/comparing.md)


@dataclass(frozen=True)
class Comparison:
    groups: list[Group]
    left_out: list[LeftOut]
    thresholds: dict[Task, float | None]  # a reward; None where no episode has ended in some run

    @classmethod
    def load(cls, paths: Sequence[Path], *, unfinished: bool = False, threshold: float | None = None) -> Comparison:
        runs, left_out = load_runs(paths, unfinished=unfinished)
        if not runs:
            reasons = "; ".join(map(str, left_out))
            raise UserError(f"There is nothing to compare. Left out: {reasons}." if reasons else "No run was given.")
        return cls.of(runs, left_out, threshold)

    @classmethod
    def of(cls, runs: Sequence[RunRecord], left_out: list[LeftOut], threshold: float | None = None) -> Comparison:
        groups = group_runs(runs)
        tasks = dict.fromkeys(group.task for group in groups)
        mine = {task: [group for group in groups if group.task == task] for task in tasks}
        return cls(groups, left_out, {t: _threshold(mine[t]) if threshold is None else threshold for t in tasks})

    @property
    def tasks(self) -> list[Task]:
        return list(self.thresholds)

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(group.variant for group in self.groups))

    @property
    def runs(self) -> list[RunRecord]:
        return [run for group in self.groups for run in group.runs]

    def of_task(self, task: Task) -> list[Group]:
        return [group for group in self.groups if group.task == task]

    def group(self, variant: str, task: Task) -> Group | None:
        return next((g for g in self.groups if g.variant == variant and g.task == task), None)

    def speedup(self, group: Group) -> float | None:
        """Over the same algorithm in sequential mode on the same task, if there is exactly one such group."""
        base = [g for g in self.of_task(group.task) if (g.algorithm, g.mode) == (group.algorithm, "sequential")]
        mine, theirs = group.estimate(figures.fps), base[0].estimate(figures.fps) if len(base) == 1 else None
        return mine.value / theirs.value if mine and theirs and theirs.value > 0 and group is not base[0] else None

    # Over all games

    @property
    def basis(self) -> tuple[str, str, Metric] | None:
        """Which rewards are compared: the best kind that every run has."""
        return next((b for b in BASES if all(b[2](run) is not None for run in self.runs)), None)

    def scores(self) -> dict[str, list[np.ndarray]]:
        """Variant -> normalised scores [game][seed], on the games that every variant played; empty without ranges."""
        if self.basis is None:
            return {}
        common = [task for task in self.common_tasks if _has_range(task)]
        if not common:
            return {}
        metric = self.basis[2]
        return {v: [_normalised(g, metric) for t in common if (g := self.group(v, t))] for v in self.variants}

    def interquartile_means(self) -> dict[str, Estimate]:
        return {variant: statistics.interquartile_mean(of) for variant, of in self.scores().items()}

    def rewards(self) -> dict[str, Estimate]:
        """Variant -> mean reward on the one game all played, or interquartile mean of the scores on several."""
        if len(self.common_tasks) == 1 and self.basis is not None:
            return self._means(self.basis[2])
        return self.interquartile_means()

    def speeds(self) -> dict[str, Estimate]:
        """Variant -> environment steps per second, mean over the games that every variant played."""
        if len(self.common_tasks) == 1:
            return self._means(figures.fps)
        return {
            variant: statistics.stratified_mean(
                [np.array(g.values(figures.fps)) for t in self.common_tasks if (g := self.group(variant, t))]
            )
            for variant in (self.variants if self.common_tasks else ())
        }

    @property
    def common_tasks(self) -> list[Task]:
        return [task for task in self.tasks if all(self.group(variant, task) for variant in self.variants)]

    @property
    def enough_seeds(self) -> bool:
        """On one game intervals are Student's and hold for two seeds; a bootstrap over games needs three of each."""
        seeds = [len(g.runs) for g in self.groups if g.task in self.common_tasks]
        return len(self.common_tasks) == 1 or min(seeds, default=0) >= SEEDS_FOR_A_WINNER

    def _means(self, metric: Metric) -> dict[str, Estimate]:
        pairs = ((g.variant, g.estimate(metric)) for g in self.of_task(self.common_tasks[0]))
        return {variant: estimate for variant, estimate in pairs if estimate is not None}

    def machines(self) -> list[tuple[str, int | None]]:
        """(CPU, usable cores) of the machines that the runs name."""
        seen = ((run.summary.cpu_model, run.summary.usable_cores) for run in self.runs)
        return list(dict.fromkeys((model, cores) for model, cores in seen if model))

    def warnings(self) -> list[str]:
        """What a reader has to know before trusting a comparison of these runs."""
        found = []
        machines = self.machines()
        if len(machines) > 1:
            names = ", ".join(f"{model}, {cores} cores" for model, cores in machines)
            found.append(f"The runs come from different machines ({names}): their speeds do not compare.")
        unfinished = [run for run in self.runs if run.state != "finished"]
        if unfinished:
            found.append(f"{len(unfinished)} of {len(self.runs)} runs are not finished.")
        seeds = min(len(group.runs) for group in self.groups)
        if seeds == 1:
            found.append("One seed: no interval. Differences between single runs are not differences of algorithms.")
        elif seeds == 2 and len(self.common_tasks) == 1:
            found.append("Two seeds: the intervals are very wide. A third seed narrows them to about a third.")
        elif not self.enough_seeds:
            found.append(f"{seeds} seeds a game are too few to name a winner over several games.")
        if len({run.evaluations["train"].deterministic for run in self.runs if "train" in run.evaluations}) > 1:
            found.append("Some agents were evaluated with sampled actions, others with the likeliest ones.")
        return found


def _threshold(groups: Sequence[Group]) -> float | None:
    """The highest reward that every group ended with: the time to reach it exists for nearly all runs."""
    finals = [group.estimate(figures.final_reward) for group in groups]
    known = [final.value for final in finals if final is not None]
    return min(known) if len(known) == len(groups) else None


def _has_range(task: Task) -> bool:
    return published.normalized_score(task.env, 0.0) is not None


def _normalised(group: Group, metric: Metric) -> np.ndarray:
    scores = [published.normalized_score(group.task.env, value) for value in group.values(metric)]
    return np.array([score for score in scores if score is not None])
