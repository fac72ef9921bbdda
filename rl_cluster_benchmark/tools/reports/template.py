"""The benchmark template: a block for each variant, then metric by metric who is ahead and by how much."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis import groups as figures
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.evaluations import Evaluation, how_played
from rl_cluster_benchmark.tools.analysis.groups import EVALUATED, LEVELS, Group, LearningTask, Metric, in_summary
from rl_cluster_benchmark.tools.analysis.runs import RunRecord
from rl_cluster_benchmark.tools.analysis.statistics import ONE_SEED, Estimate
from rl_cluster_benchmark.tools.analysis.verdicts import headline

WIDTH = 79
HEAVY, LIGHT = "=" * WIDTH, "-" * WIDTH
MARK = "*"


@dataclass(frozen=True)
class Line:
    name: str
    metric: Metric
    places: int
    unit: str = ""
    more_is_better: bool = True
    levels: str | None = None  # of an evaluation


LINES = (
    Line("Average FPS", figures.fps, 0),
    Line("Total Timesteps", figures.steps, 0),
    Line("Final Reward", figures.final_reward, 2),
    Line("Best Reward", figures.best_reward, 2),
    *(Line(f"Evaluation, {name}", EVALUATED[levels], 2, levels=levels) for levels, name in LEVELS.items()),
    Line("Memory Usage", figures.memory, 2, " GB", more_is_better=False),
)


def _lines(groups: list[Group]) -> list[Line]:
    """Return the lines of the comparison; lengths of episodes are compared on levels of one kind."""
    evaluated = [run.evaluations.keys() for group in groups for run in group.runs]
    levels = next((levels for levels in ("test", "all") if all(levels in mine for mine in evaluated)), None)
    if levels is None:
        return list(LINES)
    metric = figures.in_evaluation(levels, "mean_length")
    length = Line("Episode Length (shorter better)", metric, 2, more_is_better=False, levels=levels)
    return [*LINES, length]


def as_template(comparison: Comparison) -> str:
    return "\n\n".join("\n".join(_task_block(comparison, task)) for task in comparison.tasks)


def _task_block(comparison: Comparison, task: LearningTask) -> list[str]:
    groups = comparison.of_task(task)
    lines = [*_machine(groups, task), ""]
    for group in groups:
        lines += [*_run_block(group), ""]
    if len(groups) > 1:
        lines += _metric_block(groups)
    lines += ["", f"Conclusion: {' '.join(headline(Comparison.of([r for g in groups for r in g.runs], [])))}"]
    return [*map(text.plain, lines), HEAVY]


def _machine(groups: list[Group], task: LearningTask) -> list[str]:
    """Describe the machine of the runs as far as they name it; name and memory are known of this one only."""
    run = groups[0].runs[0]
    here = detection.detect()
    model, cores = run.summary.cpu_model or "unknown", run.summary.usable_cores
    is_here = model == here.cpu_model and cores == here.usable_cores
    hours = max(r.summary.duration_hours for g in groups for r in g.runs)
    return [
        HEAVY,
        f"BENCHMARK RESULTS - {platform.node() if is_here else model}",
        HEAVY,
        f"Date: {run.summary.finished_at or datetime.date.today().isoformat()}",
        f"CPU: {model}",
        f"Cores/Threads: {cores or text.NOTHING}/{os.cpu_count() if is_here else text.NOTHING}",
        f"RAM: {f'{here.memory_bytes / 1e9:.0f} GB' if is_here else text.NOTHING}",
        f"Environment: {task.env.name}",
        f"Duration: {hours:.2f} hours ({hours * 60:.0f} minutes)",
        HEAVY,
    ]


def _run_block(group: Group) -> list[str]:
    """Return a group's means over seeds; the ± are standard deviations over episodes."""

    def mean(of: Callable[[RunRecord], float | None]) -> float | None:
        values = group.values(of)
        return sum(values) / len(values) if values else None

    lines = [group.variant.upper(), LIGHT]
    if len(group.runs) > 1:
        lines.append(f"Means over {len(group.runs)} seeds: {', '.join(str(run.seed) for run in group.runs)}")
    lines += [
        f"Duration: {text.decimal(mean(in_summary('duration_hours')))} hours",
        f"Total Environments: {group.runs[0].config.env.num_envs}",
        f"Total Timesteps: {text.whole(mean(figures.steps))}",
        f"Total Updates: {text.whole(mean(in_summary('total_updates')))}",
        f"Average FPS: {text.whole(mean(figures.fps))}",
        f"Final FPS: {text.whole(mean(in_summary('final_fps')))}",
        f"Peak Memory: {text.decimal(mean(figures.memory))} GB",
        "",
        "Training Progress:",
        f"  Initial Reward: {_pm(mean(in_summary('initial_reward')), mean(in_summary('initial_reward_std')))}",
        f"  Final Reward: {_pm(mean(figures.final_reward), mean(in_summary('final_reward_std')))}",
        f"  Best Reward: {text.decimal(mean(figures.best_reward))}",
    ]
    for levels, name in LEVELS.items():
        found = [run.evaluations[levels] for run in group.runs if levels in run.evaluations]
        for way in (False, True):  # sampled actions do not count in one mean with the likeliest ones
            alike = [evaluation for evaluation in found if evaluation.deterministic == way]
            if alike:
                lines += ["", *_evaluation_block(alike, name)]
    return lines


def _evaluation_block(found: list[Evaluation], name: str) -> list[str]:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    count, how = how_played(found)
    how = "deterministic" if all(e.deterministic for e in found) else how
    return [
        f"Evaluation Results ({count} episodes, {how}, {name}):",
        f"  Mean Reward: {_pm(mean([e.mean_reward for e in found]), mean([e.std_reward for e in found]))}",
        f"  Min/Max Reward: {min(e.min_reward for e in found):.2f} / {max(e.max_reward for e in found):.2f}",
        f"  Mean Episode Length: {_pm(mean([e.mean_length for e in found]), mean([e.std_length for e in found]))}",
    ]


def _pm(value: float | None, spread: float | None) -> str:
    return text.decimal(value) if spread is None else f"{text.decimal(value)} ± {spread:.2f}"


def _metric_block(groups: list[Group]) -> list[str]:
    rows, is_marked = [], False
    for line in _lines(groups):
        estimates = [_estimate(group, line) for group in groups]
        if all(estimate is None for estimate in estimates):
            continue
        winner = _winner(groups, estimates, line)
        is_marked |= winner.endswith(MARK)
        rows.append([line.name, *(_cell(estimate, line) for estimate in estimates), winner])
    lines = ["COMPARISON", LIGHT, *text.table(["Metric", *(group.variant for group in groups), "Winner"], rows)]
    if is_marked:
        lines += ["", f"{MARK} {ONE_SEED}; a difference between single runs, not between algorithms."]
    return lines


def _estimate(group: Group, line: Line) -> Estimate | None:
    acted_alike = line.levels is None or figures.ways_of_acting(group.runs, line.levels) < 2
    return group.estimate(line.metric) if acted_alike else None


def _cell(estimate: Estimate | None, line: Line) -> str:
    return text.NOTHING if estimate is None else f"{text.decimal(estimate.value, line.places)}{line.unit}"


def _winner(groups: list[Group], estimates: list[Estimate | None], line: Line) -> str:
    """Return who is first and how far ahead of the next; nobody where intervals overlap or figures do not compare."""
    pairs = [(g, e) for g, e in zip(groups, estimates, strict=True) if e is not None]
    if len(pairs) < len(groups) or not _are_comparable(groups, line):
        return text.NOTHING
    pairs.sort(key=lambda pair: pair[1].value, reverse=line.more_is_better)
    (first, best), (_, next_best) = pairs[:2]
    if best.value == next_best.value:
        return "none: equal"
    mine, *others = (Estimate(e.value, _interval(g, e, line)) for g, e in pairs)
    if any(mine.overlaps(other) for other in others):
        return "none: intervals overlap"
    base = abs(next_best.value)
    percent = 100 * (best.value - next_best.value) / base if base > 1e-9 else None
    if percent is not None and abs(percent) < 0.5:
        return "none: less than 1% apart"
    margin = f" ({percent:+.0f}%)" if percent is not None else ""
    has_seeds = best.interval is not None and next_best.interval is not None
    return f"{first.variant}{margin}{'' if has_seeds else MARK}"


def _are_comparable(groups: list[Group], line: Line) -> bool:
    """Return whether the speeds are of one machine, and evaluations played in one way."""
    runs = [run for group in groups for run in group.runs]
    if line.metric is figures.fps:
        return figures.speeds_compare(runs)
    return line.levels is None or figures.ways_of_acting(runs, line.levels) < 2


def _interval(group: Group, estimate: Estimate, line: Line) -> tuple[float, float] | None:
    """Return the interval over seeds; for one seed's rewards, that over its episodes."""
    if estimate.interval is not None:
        return estimate.interval
    run = group.runs[0]
    if line.levels is not None and line.metric is EVALUATED[line.levels]:
        return run.evaluations[line.levels].ci95
    spread = run.summary.final_reward_std
    if line.metric is figures.final_reward and spread is not None:
        half = 1.96 * spread / math.sqrt(max(1.0, min(WINDOW, run.summary.num_episodes)))
        return estimate.value - half, estimate.value + half
    return None
