"""The comparison of any number of runs as text, Markdown, CSV or JSON: the same figures in each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.tools.analysis import groups as figures
from rl_cluster_benchmark.tools.analysis import statistics
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.groups import Group, LearningTask, Metric
from rl_cluster_benchmark.tools.analysis.statistics import ONE_SEED, Estimate
from rl_cluster_benchmark.tools.analysis.verdicts import headline, interval

MakeTable = Callable[[text.Row, Sequence[text.Row]], list[str]]

# name in CSV and JSON -> figure of a run
METRICS: dict[str, Metric] = {
    "fps": figures.fps,
    "steps": figures.steps,
    "final_reward": figures.final_reward,
    **{f"{levels}_levels_reward": metric for levels, metric in figures.EVALUATED.items()},
    "generalisation_gap": figures.gap,
    "peak_memory_gb": figures.memory,
}


def as_table(comparison: Comparison) -> str:
    return "\n".join([*all_tables(comparison, text.table, str, "COMPARISON: "), *_closing(comparison, "  ")])


def as_markdown(comparison: Comparison) -> str:
    return "\n".join([*markdown_tables(comparison), *map(text.escape_markdown, _closing(comparison, ""))])


def markdown_tables(comparison: Comparison) -> list[str]:
    return all_tables(comparison, text.markdown_table, lambda title: f"### {text.escape_markdown(title)}")


def all_tables(
    comparison: Comparison, make: MakeTable, heading: Callable[[str], str], of_a_task: str = ""
) -> list[str]:
    """Return the tables of every task, and those of the scores; `of_a_task` stands before the name of a task."""
    lines: list[str] = []
    for task in comparison.tasks:
        lines += [heading(f"{of_a_task}{task}"), "", *task_table(comparison, task, make), ""]
    return lines + score_tables(comparison, make, heading)


def task_table(comparison: Comparison, task: LearningTask, make: MakeTable) -> list[str]:
    """Return two tables with a row per variant, speed and then reward."""
    groups = comparison.of_task(task)
    lines: list[str] = []
    for head, *rows in (speed_rows(comparison, task), reward_rows(comparison, task)):
        lines += [*make(head, rows), ""]
    if any(len(group.runs) == 1 for group in groups):
        lines += [f"{ONE_SEED} where a figure stands alone.", ""]
    return lines[:-1]


def speed_rows(comparison: Comparison, task: LearningTask) -> list[list[str]]:
    """Return the head, then a row per variant."""
    threshold = comparison.thresholds[task]
    reach = f"time to {text.decimal(threshold)}" if threshold is not None else "time to reward"
    rows = [["run", "seeds", "steps", "FPS", "speed-up", reach, "memory GB"]]
    for group in comparison.of_task(task):
        speedup = comparison.speedup(group)
        steps = group.estimate(figures.steps)
        rows.append(
            [
                group.variant,
                str(len(group.runs)),
                text.whole(steps.value if steps else None),
                interval(group.estimate(figures.fps), 0),
                text.NOTHING if speedup is None else f"{speedup:.2f}x",
                time_to(group, threshold),
                interval(group.estimate(figures.memory)),
            ]
        )
    return _without_empty_columns(rows)


def reward_rows(comparison: Comparison, task: LearningTask) -> list[list[str]]:
    """Return the head, then a row per variant."""
    rows = [["run", "reward in training", *figures.LEVELS.values(), "gap", "published PPO"]]
    metrics = (figures.final_reward, *figures.EVALUATED.values(), figures.gap)
    rows += [
        [group.variant, *(interval(group.estimate(metric)) for metric in metrics), published_cell(group)]
        for group in comparison.of_task(task)
    ]
    return _without_empty_columns(rows)


def _without_empty_columns(rows: list[list[str]]) -> list[list[str]]:
    used = [i for i in range(len(rows[0])) if i == 0 or any(row[i] != text.NOTHING for row in rows[1:])]
    return [[row[i] for i in used] for row in rows]


def time_to(group: Group, threshold: float | None) -> str:
    """Return the mean time of the seeds that reached it, and how many did where not all."""
    if threshold is None:
        return text.NOTHING
    times = [when[1] for run in group.runs if (when := figures.reached(run, threshold))]
    if not times:
        return "not reached"
    some = f" ({len(times)} of {len(group.runs)})" if len(times) < len(group.runs) else ""
    return text.duration(sum(times) / len(times)) + some


def published_cell(group: Group) -> str:
    """Return the published PPO's training and test reward after as many steps, or at its first point."""
    steps = group.estimate(figures.steps)
    points = figures.published.curve(group.task.env)
    if steps is None or not points:
        return text.NOTHING
    at = max(steps.value, points[0].step)
    rewards = [figures.published_reward(group.task, at, split) for split in ("train", "test")]
    known = [text.decimal(reward) for reward in rewards if reward is not None]
    if not known:
        return text.NOTHING
    early = f" at {points[0].step / 1e6:g}M" if steps.value < points[0].step else ""
    return " / ".join(known) + early


def score_tables(comparison: Comparison, make: MakeTable, heading: Callable[[str], str]) -> list[str]:
    """Return interquartile means and probabilities of improvement; nothing where no range of scores is published."""
    scores = comparison.scores()
    if not scores or comparison.basis is None:
        return []
    games = len(next(iter(scores.values())))
    where = f"{games} game{'s' if games > 1 else ''}, {comparison.basis[1]}"
    lines = [heading(f"Normalised scores ({where})"), ""]
    rows = [[name, interval_or_reason(e, 3)] for name, e in comparison.interquartile_means().items()]
    lines += [*make(("run", "interquartile mean (95%)"), rows), ""]
    improvements = probabilities(scores)
    if improvements:
        rows = [[a, b, interval_or_reason(estimate)] for a, b, estimate in improvements]
        lines += [heading("Probability of improvement"), ""]
        lines += [*make(("a run of", "scores higher than one of", "probability (95%)"), rows), ""]
    return lines


def probabilities(scores: dict[str, list[Any]]) -> list[tuple[str, str, Estimate]]:
    """Return each pair's probability of improvement; none for single runs, of which one is always higher."""
    if any(len(game) < 2 for games in scores.values() for game in games):
        return []
    return [(a, b, statistics.probability_of_improvement(scores[a], scores[b])) for a, b in combinations(scores, 2)]


def interval_or_reason(estimate: Estimate, places: int = 2) -> str:
    return interval(estimate, places) + (f" ({ONE_SEED})" if estimate.interval is None else "")


def _closing(comparison: Comparison, indent: str) -> list[str]:
    lines = headline(comparison)
    lines += [f"Note: {warning}" for warning in comparison.warnings()]
    if comparison.left_out:
        lines += ["", "Left out:", *(f"{indent}{item}" for item in comparison.left_out)]
    return lines


def as_csv(comparison: Comparison) -> str:
    """Return a line for each group: each figure with the two ends of its interval."""
    return text.as_csv([_flat(entry) for entry in as_data(comparison)["groups"]]).rstrip("\n")


def as_json(comparison: Comparison) -> str:
    return json.dumps(as_data(comparison), indent=2)


def as_data(comparison: Comparison) -> dict[str, Any]:
    scores = comparison.scores()
    improvement = [{"x": a, "y": b, "probability": _estimate(estimate)} for a, b, estimate in probabilities(scores)]
    return {
        "groups": [_group_data(comparison, group) for group in comparison.groups],
        "scores": {
            "basis": comparison.basis[1] if comparison.basis else None,
            "interquartile_mean": {v: _estimate(e) for v, e in comparison.interquartile_means().items()},
            "probability_of_improvement": improvement,
        },
        "headline": headline(comparison),
        "notes": comparison.warnings(),
        "left_out": [{"run": str(item.path), "reason": item.reason} for item in comparison.left_out],
    }


def _group_data(comparison: Comparison, group: Group) -> dict[str, Any]:
    threshold = comparison.thresholds[group.task]
    when = [figures.reached(run, threshold) for run in group.runs] if threshold is not None else []
    known = [point for point in when if point]
    steps = group.estimate(figures.steps)
    return {
        "variant": group.variant,
        "algorithm": group.algorithm,
        "mode": group.mode,
        "env": group.task.env.name,
        "distribution_mode": group.task.env.distribution_mode,
        "num_levels": group.task.env.num_levels,
        "seeds": [run.seed for run in group.runs],
        "runs": [str(run.path) for run in group.runs],
        "speedup": comparison.speedup(group),
        "threshold": threshold,
        "seeds_at_threshold": len(known),
        "seconds_to_threshold": sum(point[1] for point in known) / len(known) if known else None,
        "steps_to_threshold": sum(point[0] for point in known) / len(known) if known else None,
        "published_ppo_train": figures.published_reward(group.task, steps.value, "train") if steps else None,
        "published_ppo_test": figures.published_reward(group.task, steps.value, "test") if steps else None,
        **{name: _estimate(group.estimate(metric)) for name, metric in METRICS.items()},
    }


def _estimate(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    low, high = estimate.interval or (None, None)
    return {"mean": estimate.value, "low": low, "high": high}


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in entry.items():
        if name in METRICS:
            value = value or dict.fromkeys(("mean", "low", "high"))
            flat |= {name: value["mean"], f"{name}_low": value["low"], f"{name}_high": value["high"]}
        else:
            flat[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat
