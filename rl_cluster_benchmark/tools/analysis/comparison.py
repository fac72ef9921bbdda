"""Several runs side by side: groups, thresholds, normalised scores, and what may be said about who is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from rl_cluster_benchmark.config.traits import is_sequential
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.text import duration, whole
from rl_cluster_benchmark.env import published
from rl_cluster_benchmark.tools.analysis import groups as figures
from rl_cluster_benchmark.tools.analysis import statistics
from rl_cluster_benchmark.tools.analysis.groups import EVALUATED, LEVELS, Group, LearningTask, Metric, group_runs
from rl_cluster_benchmark.tools.analysis.runs import LeftOut, RunRecord, load_runs
from rl_cluster_benchmark.tools.analysis.statistics import Estimate

BASES: tuple[tuple[str, str, Metric], ...] = (
    *((levels, f"evaluation on {LEVELS[levels]}", EVALUATED[levels]) for levels in ("test", "all", "train")),
    ("training", "last 100 episodes of training", figures.final_reward),
)

SHOWN_VERSIONS = 3
ALIKE = 1.1  # times as many steps, or as much time: runs end with a whole update
SEEDS_FOR_A_WINNER = 3  # with two, a bootstrap names a winner among equals in 8 to 38 of 100 cases (docs/comparing.md)


@dataclass(frozen=True)
class Comparison:
    """Groups of runs that are compared on the tasks that they have learned."""

    groups: list[Group]
    left_out: list[LeftOut]
    thresholds: dict[LearningTask, float | None]  # a reward; None where no episode has ended in some run

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
    def tasks(self) -> list[LearningTask]:
        return list(self.thresholds)

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(group.variant for group in self.groups))

    @property
    def runs(self) -> list[RunRecord]:
        return [run for group in self.groups for run in group.runs]

    def of_task(self, task: LearningTask) -> list[Group]:
        return [group for group in self.groups if group.task == task]

    def longest_run(self, task: LearningTask) -> float:
        """Return the steps of the run of this task that has most."""
        return max(run.summary.total_timesteps for group in self.of_task(task) for run in group.runs)

    def group(self, variant: str, task: LearningTask) -> Group | None:
        return next((g for g in self.groups if g.variant == variant and g.task == task), None)

    def speedup(self, group: Group) -> float | None:
        """Return the speed over that of the same algorithm in sequential mode on the same task and machine.

        None unless there is exactly one such group.
        """
        base = self._sequential(group)
        if base is None:
            return None
        mine, theirs = group.estimate(figures.fps), base.estimate(figures.fps)
        return mine.value / theirs.value if mine and theirs and theirs.value > 0 else None

    def _sequential(self, group: Group) -> Group | None:
        """Return the group that the speed of this one is a multiple of."""
        tasks = self.of_task(group.task)
        base = [g for g in tasks if g.algorithm == group.algorithm and is_sequential(g.mode)]
        if len(base) != 1 or group is base[0] or not figures.speeds_compare([*group.runs, *base[0].runs]):
            return None
        return base[0]

    # Over all games

    @property
    def basis(self) -> tuple[str, str, Metric] | None:
        """Return which rewards are compared: the best kind that every run has, with actions chosen in one way."""
        return next(
            (
                basis
                for basis in BASES
                if all(basis[2](run) is not None for run in self.runs)
                and figures.ways_of_acting(self.runs, basis[0]) < 2
            ),
            None,
        )

    def scores(self) -> dict[str, list[np.ndarray]]:
        """Return each variant's normalised scores [game][seed] on the games that all played; empty without ranges."""
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
        """Return each variant's mean reward on the one game all played, or its interquartile mean score on several."""
        if len(self.common_tasks) == 1 and self.basis is not None:
            return self._means(self.basis[2])
        return self.interquartile_means()

    def speeds(self) -> dict[str, Estimate]:
        """Return each variant's environment steps per second, the mean over the games that every variant played."""
        if len(self.common_tasks) == 1:
            return self._means(figures.fps)
        return {
            variant: statistics.stratified_mean(
                [np.array(g.values(figures.fps)) for t in self.common_tasks if (g := self.group(variant, t))]
            )
            for variant in (self.variants if self.common_tasks else ())
        }

    @property
    def common_tasks(self) -> list[LearningTask]:
        return [task for task in self.tasks if all(self.group(variant, task) for variant in self.variants)]

    @property
    def enough_seeds(self) -> bool:
        """Return whether there are enough seeds to name a winner.

        On one game intervals are Student's and hold for two seeds; a bootstrap over games needs three of each.
        """
        seeds = [len(g.runs) for g in self.groups if g.task in self.common_tasks]
        return len(self.common_tasks) == 1 or min(seeds, default=0) >= SEEDS_FOR_A_WINNER

    def _means(self, metric: Metric) -> dict[str, Estimate]:
        pairs = ((g.variant, g.estimate(metric)) for g in self.of_task(self.common_tasks[0]))
        return {variant: estimate for variant, estimate in pairs if estimate is not None}

    def machines(self) -> list[tuple[str, int | None]]:
        return figures.machines(self.runs)

    def warnings(self) -> list[str]:
        """Return what a reader has to know before trusting a comparison of these runs."""
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
        elif self.common_tasks and not self.enough_seeds:
            found.append(f"{seeds} seeds a game are too few to name a winner over several games.")
        if not self.common_tasks:
            found.append("No game was played by all variants: they are not ranked.")
        return found + self._unequal_training() + self._unequal_work() + self._doubts()

    def _unequal_training(self) -> list[str]:
        """Name the tasks on which the variants had neither equally many steps nor equally much time to learn."""
        found = []
        for task in self.tasks:
            groups = self.of_task(task)
            steps = [fmean(run.summary.total_timesteps for run in group.runs) for group in groups]
            seconds = [fmean(3600 * run.summary.duration_hours for run in group.runs) for group in groups]
            if all(max(each) > ALIKE * min(each) for each in (steps, seconds)):
                found.append(
                    f"On {task.game} the variants trained for different numbers of steps ({whole(min(steps))} to "
                    f"{whole(max(steps))}) and different times ({duration(min(seconds))} to "
                    f"{duration(max(seconds))}): one may have learned more because it had more."
                )
        return found

    def _unequal_work(self) -> list[str]:
        """Name the speed-ups over sequential runs whose settings put another amount of work into a step."""
        found = []
        for group in self.groups:
            base = self._sequential(group)
            keys = figures.other_work(base.runs[0], group.runs[0]) if base is not None else []
            if base is not None and keys:
                found.append(
                    f"On {group.task.game} {base.variant} and {group.variant} differ in {', '.join(keys)} too: the "
                    "speed-up is not that of the mode alone."
                )
        return found

    def _doubts(self) -> list[str]:
        """Say where results are not of one kind, or are not known to be of these runs."""
        found = [f"{run.path}: {doubt}." for run in self.runs for doubt in run.doubts]
        evaluations = [evaluation for run in self.runs for evaluation in run.evaluations.values()]
        if len({evaluation.deterministic for evaluation in evaluations}) > 1:
            found.append("Some agents were evaluated with sampled actions, others with the likeliest ones.")
        kinds = {levels for run in self.runs for levels in run.evaluations} & {"test", "all"}
        if any(kinds - run.evaluations.keys() for run in self.runs if run.evaluations) and len(kinds) > 1:
            found.append("Some agents were evaluated on unseen levels, others on all: those do not compare.")
        unknown = sum(evaluation.origin is None for evaluation in evaluations)
        if unknown:
            found.append(
                f"{unknown} of {len(evaluations)} evaluations do not say which checkpoint they are of (an older "
                "version wrote them): each is taken for that of the run in whose directory it lies."
            )
        codes = list(dict.fromkeys(code for run in self.runs if (code := _code(run))))
        if len(codes) > 1:
            more = f"; and {len(codes) - SHOWN_VERSIONS} more" if len(codes) > SHOWN_VERSIONS else ""
            shown = "; ".join(codes[:SHOWN_VERSIONS]) + more
            found.append(f"The runs come from different versions of the program or its libraries: {shown}.")
        return found + [
            f"{' and '.join(paths)} have one beginning (a copy went on): they are not independent."
            for paths in self._same_run()
        ]

    def _same_run(self) -> list[list[str]]:
        members: dict[str, list[str]] = {}
        for run in self.runs:
            if run.summary.run_id is not None:
                members.setdefault(run.summary.run_id, []).append(str(run.path))
        return [paths for paths in members.values() if len(paths) > 1]


def _code(run: RunRecord) -> str:
    """Return `rl_cluster_benchmark 0.1.0, torch 2.11.0 at commit a6fda55`, as far as the summary says."""
    known = run.summary.versions
    versions = ", ".join(f"{name} {known[name]}" for name in sorted(known) if name != "python")
    commit = run.summary.git_commit
    return versions + (f" at commit {commit[:7]}{'+' if commit.endswith('+') else ''}" if commit else "")


def _threshold(groups: Sequence[Group]) -> float | None:
    """Return the highest reward that every group ended with: nearly all runs have then reached it at some time."""
    finals = [group.estimate(figures.final_reward) for group in groups]
    known = [final.value for final in finals if final is not None]
    return min(known) if len(known) == len(groups) else None


def _has_range(task: LearningTask) -> bool:
    return published.normalized_score(task.env, 0.0) is not None


def _normalised(group: Group, metric: Metric) -> np.ndarray:
    scores = [published.normalized_score(group.task.env, value) for value in group.values(metric)]
    return np.array([score for score in scores if score is not None])
