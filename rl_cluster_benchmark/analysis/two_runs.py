"""One sequential and one parallel run: the table, the plot and the text report that the guide documents."""

from __future__ import annotations

from pathlib import Path

from rl_cluster_benchmark.analysis.comparison import Comparison
from rl_cluster_benchmark.analysis.comparison_plot import plot_comparison
from rl_cluster_benchmark.analysis.curves import Axis
from rl_cluster_benchmark.analysis.runs import RunRecord, UnusableRunError, load_run, require_usable
from rl_cluster_benchmark.analysis.text import NOTHING, decimal, plain, whole
from rl_cluster_benchmark.errors import UserError

WIDTH = 80
HEAVY, LIGHT = "=" * WIDTH, "-" * WIDTH


def compare_two(
    sequential: Path, parallel: Path, *, output: Path, report: Path, unfinished: bool = False, x: Axis = "step"
) -> int:
    one = _load("--sequential", sequential, unfinished)
    other = _load("--parallel", parallel, unfinished)
    if one.mode != "sequential" or other.mode == "sequential":
        raise UserError(
            f"--sequential {sequential} is a {one.mode} run and --parallel {parallel} a {other.mode} one; "
            "`rlcb compare DIR DIR` compares any two."
        )
    print("\n".join(two_run_table(one, other)))
    comparison = Comparison.of([one, other], [])
    plot_comparison(comparison, output, x, title="Sequential and parallel training")
    write_text(report, "\n".join(two_run_report(one, other)) + "\n")
    print(f"\nPlot saved to: {output}\nReport saved to: {report}")
    for warning in comparison.warnings():
        print(f"Note: {warning}")
    return 0


def _load(flag: str, path: Path, unfinished: bool) -> RunRecord:
    try:
        run = load_run(path)
        require_usable(run, unfinished)
        return run
    except UnusableRunError as error:
        raise UserError(plain(f"{flag} {path}: {error}.")) from None


def write_text(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror or error}).") from None


def speedup(one: RunRecord, other: RunRecord) -> float | None:
    return other.summary.avg_fps / one.summary.avg_fps if one.summary.avg_fps > 0 else None


def efficiency_gain(one: RunRecord, other: RunRecord) -> float | None:
    """How many percent more steps an hour."""
    mine, theirs = steps_per_hour(one), steps_per_hour(other)
    return 100 * (theirs / mine - 1) if mine and theirs is not None else None


def steps_per_hour(run: RunRecord) -> float | None:
    hours = run.summary.duration_hours
    return run.summary.total_timesteps / hours if hours > 0 else None


def two_run_table(one: RunRecord, other: RunRecord) -> list[str]:
    a, b = one.summary, other.summary
    gain = efficiency_gain(one, other)
    factor = speedup(one, other)
    return [
        HEAVY,
        "TRAINING COMPARISON",
        HEAVY,
        _row("Metric", "Sequential", "Parallel"),
        LIGHT,
        _row("Duration (hours)", decimal(a.duration_hours), decimal(b.duration_hours)),
        _row("Total Timesteps", whole(a.total_timesteps), whole(b.total_timesteps)),
        _row("Total Updates", whole(a.total_updates), whole(b.total_updates)),
        *_section("Performance Metrics"),
        _row("Average FPS", whole(a.avg_fps), whole(b.avg_fps)),
        _row("Speedup (Parallel/Sequential)", NOTHING, NOTHING if factor is None else f"{factor:.2f}x"),
        _row("Final FPS", whole(a.final_fps), whole(b.final_fps)),
        *_section("Reward Metrics"),
        _row("Initial Reward", decimal(a.initial_reward), decimal(b.initial_reward)),
        _row("Final Reward", decimal(a.final_reward), decimal(b.final_reward)),
        _row("Best Reward", decimal(a.best_reward), decimal(b.best_reward)),
        *_section("Resource Usage"),
        _row("Peak Memory (GB)", decimal(a.peak_memory_gb), decimal(b.peak_memory_gb)),
        *_section("Efficiency Metrics"),
        _row("Timesteps/Hour", whole(steps_per_hour(one)), whole(steps_per_hour(other))),
        _row("Efficiency Gain (%)", NOTHING, NOTHING if gain is None else f"{gain:.1f}%"),
        HEAVY,
    ]


def two_run_report(one: RunRecord, other: RunRecord) -> list[str]:
    gain, factor = efficiency_gain(one, other), speedup(one, other)
    lines = [HEAVY, "SEQUENTIAL VS PARALLEL TRAINING COMPARISON REPORT", HEAVY, ""]
    lines += [plain(f"Sequential Directory: {one.path}"), plain(f"Parallel Directory: {other.path}")]
    for name, run in (("SEQUENTIAL", one), ("PARALLEL", other)):
        lines += [
            *_section(f"{name} TRAINING"),
            f"Duration: {run.summary.duration_hours:.2f} hours",
            f"Total Timesteps: {whole(run.summary.total_timesteps)}",
            f"Average FPS: {whole(run.summary.avg_fps)}",
            f"Peak Memory: {run.summary.peak_memory_gb:.2f} GB",
        ]
    lines += _section("COMPARISON")
    lines.append(f"Speedup (FPS): {NOTHING if factor is None else f'{factor:.2f}x'}")
    lines.append(f"Efficiency Gain: {NOTHING if gain is None else f'{gain:.1f}%'}")
    return lines


def _section(title: str) -> list[str]:
    return ["", title, LIGHT]


def _row(name: str, one: str, other: str) -> str:
    return f"{name:<40} {one:<20} {other:<20}"
