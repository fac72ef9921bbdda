"""What the report shows, as plain values: the template only lays them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.env import published
from rl_cluster_benchmark.tools.analysis import groups as figures
from rl_cluster_benchmark.tools.analysis import statistics
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.curves import REWARD, Axis, curve
from rl_cluster_benchmark.tools.analysis.evaluations import how_played
from rl_cluster_benchmark.tools.analysis.groups import Group, LearningTask
from rl_cluster_benchmark.tools.analysis.statistics import ONE_SEED, Estimate
from rl_cluster_benchmark.tools.analysis.verdicts import headline, interval
from rl_cluster_benchmark.tools.reports import tables
from rl_cluster_benchmark.tools.reports.report_runs import clips, run_entry

REFERENCE = "published PPO"
NO_REWARD = "no episode has ended in every run"
PANELS: dict[str, dict[str, Any]] = {
    "reward": {"title": "Reward, mean of 100 episodes", "metric": REWARD, "fromZero": False, "empty": NO_REWARD},
    "speed": {"title": "Speed, environment steps per second", "metric": "charts/SPS", "fromZero": True},
    "loss": {"title": "Policy loss", "metric": "losses/policy_loss", "fromZero": False},
    "progress": {"title": "Environment steps against time", "metric": "step", "fromZero": True},
}
PROFILE_THRESHOLDS = np.linspace(0, 1, 21)


def colors(comparison: Comparison) -> dict[str, str]:
    return {variant: f"var(--c{index % 8})" for index, variant in enumerate(comparison.variants)}


def page(comparison: Comparison, title: str) -> dict[str, Any]:
    """Return all that the page's template shows but the scripts and styles."""
    return {
        "title": title,
        "machine": machine(comparison),
        "extent": extent(comparison),
        "headline": headline(comparison),
        "notes": comparison.warnings(),
        "one_seed": f"“{ONE_SEED}” where a figure stands alone." if _single(comparison) else "",
        "colors": colors(comparison),
        "variants": comparison.variants,
        "reference": REFERENCE,
        "has_published": any(_published_line(comparison, task)["x"] for task in comparison.tasks),
        "panels": PANELS,
        "tasks": [_task(comparison, task) for task in comparison.tasks],
        "scores": _scores(comparison),
        "evaluations": _evaluations(comparison),
        "evaluation_note": _evaluation_note(comparison),
        "phases": page_phases(comparison),
        "phase_names": [{"name": name, "color": f"var(--c{i % 8})"} for i, name in enumerate(_phase_names(comparison))],
        "clips": clips(comparison),
        "runs": [run_entry(run, colors(comparison)[g.variant], g) for g in comparison.groups for run in g.runs],
        "left_out": [str(item) for item in comparison.left_out],
    }


def machine(comparison: Comparison) -> str:
    names = [f"{model}, {cores or '?'} cores" for model, cores in comparison.machines()]
    precisions = dict.fromkeys(run.summary.precision for run in comparison.runs if run.summary.precision)
    return "; ".join(names or ["unknown machine"]) + (f"; {', '.join(precisions)}" if precisions else "")


def extent(comparison: Comparison) -> str:
    seeds = sorted({len(group.runs) for group in comparison.groups})
    hours = sum(run.summary.duration_hours for run in comparison.runs)
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    return (
        f"{len(comparison.runs)} runs: {len(comparison.variants)} variants on {len(comparison.tasks)} "
        f"game{'s' if len(comparison.tasks) > 1 else ''}, {count} seed{'' if count == '1' else 's'} each, "
        f"{text.duration(hours * 3600)} of training"
    )


def _single(comparison: Comparison) -> bool:
    return any(len(group.runs) == 1 for group in comparison.groups)


# Curves


def chart_data(comparison: Comparison) -> dict[str, Any]:
    """Return what the scripts in the page draw."""
    return {
        "variants": comparison.variants,
        "reference": REFERENCE,
        "panels": PANELS,
        "profiles": _profiles(comparison),
        "tasks": [
            {
                "name": str(task),
                "published": _published_line(comparison, task),
                "groups": [
                    {
                        "variant": group.variant,
                        "seeds": len(group.runs),
                        "curves": {name: _curves(group, name, panel["metric"]) for name, panel in PANELS.items()},
                    }
                    for group in comparison.of_task(task)
                ],
            }
            for task in comparison.tasks
        ],
    }


def _curves(group: Group, panel: str, metric: str) -> dict[str, Any]:
    axes: tuple[Axis, ...] = ("step", "time")
    return {axis: _line(group, metric, "time" if panel == "progress" else axis) for axis in axes}


def _line(group: Group, metric: str, axis: Axis) -> dict[str, Any]:
    line = curve(group, metric, axis)
    x = line.x / 60 if axis == "time" else line.x
    result: dict[str, Any] = {"x": _rounded(x), "y": _rounded(line.mean), "early": int(line.early.sum())}
    if len(group.runs) > 1:
        result |= {"low": _rounded(line.low), "high": _rounded(line.high)}
    return result


def _published_line(comparison: Comparison, task: LearningTask) -> dict[str, Any]:
    points = figures.published_until(task.env, comparison.longest_run(task))
    return {"x": [p.step for p in points], "y": [p.mean for p in points]}


def _rounded(values: Any) -> list[float]:
    """Round to five figures: a tenth of a pixel, and a page of half the size."""
    return [float(f"{value:.5g}") for value in values]


# Tables and bars


def _task(comparison: Comparison, task: LearningTask) -> dict[str, Any]:
    groups = comparison.of_task(task)
    points = published.curve(task.env)
    shown = _published_line(comparison, task)["x"]
    first = f"The published PPO begins at {points[0].step:,} steps with {points[0].mean:.2f}." if points else ""
    return {
        "name": str(task),
        "speed": tables.speed_rows(comparison, task),
        "reward": tables.reward_rows(comparison, task),
        "published_note": first if points and not shown else "",
        "speeds": whiskers(
            [(g.variant, g.estimate(figures.fps)) for g in groups], colors(comparison), places=0, from_zero=True
        ),
        "scaling": _scaling(comparison, groups),
    }


def _scaling(comparison: Comparison, groups: Sequence[Group]) -> list[list[str]]:
    rows = [["run", "processes", "threads each", "environments", "speed-up", "efficiency", "CPU in use"]]
    for group in groups:
        run, speedup = group.runs[0], comparison.speedup(group)
        counts = {figures.processes(run) for run in group.runs}
        processes = counts.pop() if len(counts) == 1 else None
        cpu = group.estimate(lambda run: run.summary.cpu_utilization)
        rows.append(
            [
                group.variant,
                text.whole(processes),
                text.whole(run.summary.num_threads),
                text.whole(run.config.env.num_envs),
                text.NOTHING if speedup is None else f"{speedup:.2f}x",
                text.NOTHING if speedup is None or processes is None else f"{speedup / processes:.0%}",
                text.NOTHING if cpu is None else f"{cpu.value:.0%}",
            ]
        )
    return rows


def whiskers(
    rows: Sequence[tuple[str, Estimate | None]], palette: dict[str, str], places: int = 2, from_zero: bool = False
) -> list[dict[str, Any]]:
    """Return dots with intervals on one scale, in percent of its width; one off the scale is cut at its end."""
    known = [(name, estimate) for name, estimate in rows if estimate is not None]
    values = [estimate.value for _, estimate in known]
    spread = (max(values) - min(values)) if values else 0.0
    # Two seeds may have intervals far wider than all the means: the scale shows the means, at most three times as wide.
    reach = max(1.0 * spread, 0.25 * max(map(abs, values), default=1.0), 1e-9)
    ends = [end for _, e in known for end in (e.interval or (e.value, e.value))]
    low = max(min(ends, default=0.0), min(values, default=0.0) - reach)
    high = min(max(ends, default=1.0), max(values, default=1.0) + reach)
    low = min(0.0, low) if from_zero else low
    width = (high - low) or 1.0
    low, width = (low, 1.04 * width) if from_zero else (low - 0.04 * width, 1.08 * width)

    def place(value: float) -> float:
        return round(100 * min(1.0, max(0.0, (value - low) / width)), 2)

    return [
        {
            "name": name,
            "color": palette.get(name, "var(--accent)"),
            "middle": place(e.value),
            "left": place(e.interval[0]) if e.interval else None,
            "width": round(place(e.interval[1]) - place(e.interval[0]), 2) if e.interval else None,
            "text": interval(e, places) if e.interval else f"{interval(e, places)} ({ONE_SEED})",
        }
        for name, e in known
    ]


def _scores(comparison: Comparison) -> dict[str, Any] | None:
    scores = comparison.scores()
    if not scores or comparison.basis is None:
        return None
    games = len(next(iter(scores.values())))
    pairs = [["a run of", "scores higher than one of", "probability (95%)"]]
    pairs += [[a, b, tables.interval_or_reason(e)] for a, b, e in tables.probabilities(scores)]
    return {
        "basis": f"{comparison.basis[1].capitalize()}, {games} game{'s' if games > 1 else ''}",
        "means": whiskers(list(comparison.interquartile_means().items()), colors(comparison), places=3),
        "improvement": pairs,
    }


def _profiles(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the share of runs above each score, as a curve for each variant."""
    lines = []
    for variant, scores in comparison.scores().items():
        shares, band = statistics.performance_profile(scores, PROFILE_THRESHOLDS)
        line = {"variant": variant, "x": _rounded(PROFILE_THRESHOLDS), "y": _rounded(shares)}
        lines.append(line if band is None else line | {"low": _rounded(band[0]), "high": _rounded(band[1])})
    return lines


def _evaluations(comparison: Comparison) -> list[dict[str, Any]]:
    blocks = []
    kinds = [(name, figures.EVALUATED[levels]) for levels, name in figures.LEVELS.items()]
    kinds.append(("generalisation gap", figures.gap))
    for task in comparison.tasks:
        for name, metric in kinds:
            rows = whiskers([(g.variant, g.estimate(metric)) for g in comparison.of_task(task)], colors(comparison))
            if rows:
                blocks.append({"name": f"{task.game}: {name}", "rows": rows})
    return blocks


def _evaluation_note(comparison: Comparison) -> str:
    found = [e for run in comparison.runs for e in run.evaluations.values()]
    if not found:
        return ""
    count, how = how_played(found)
    note = f"Mean reward of {count} episodes for each agent, with {how}; intervals over seeds."
    if any(figures.gap(run) is not None for run in comparison.runs):
        note += " The generalisation gap is the reward on training levels minus that on unseen ones."
    if any(
        "all" in run.evaluations and group.task.holds_levels_back for group in comparison.groups for run in group.runs
    ):
        note += " All levels include those of training."
    return note


def _phase_names(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(name for run in comparison.runs for name in run.summary.phase_shares))[:8]


def page_phases(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a bar for each variant: mean shares over its runs."""
    names = _phase_names(comparison)
    bars = []
    for variant in comparison.variants:
        runs = [run for group in comparison.groups if group.variant == variant for run in group.runs]
        shares = {n: math.fsum(run.summary.phase_shares.get(n, 0.0) for run in runs) / len(runs) for n in names}
        parts = [
            {"name": n, "color": f"var(--c{i % 8})", "percent": round(100 * max(0.0, shares[n]), 2),
             "text": f"{shares[n]:.0%}"}
            for i, n in enumerate(names)
        ]  # fmt: skip
        largest = sorted(shares.items(), key=lambda item: -item[1])[:2]
        bars.append({"name": variant, "parts": parts, "text": ", ".join(f"{n} {share:.0%}" for n, share in largest)})
    return bars
