"""One sequential and one parallel run: the table, the plot and the text report that the guide documents."""

from __future__ import annotations

from pathlib import Path

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import MARK_OF_PLOTS, check_output, check_own, write_output
from rl_cluster_benchmark.core.text import NOTHING, decimal, plain, whole
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.curves import Axis
from rl_cluster_benchmark.tools.analysis.groups import LearningTask, speeds_compare
from rl_cluster_benchmark.tools.analysis.runs import RunRecord, UnusableRunError, load_run, require_usable
from rl_cluster_benchmark.tools.reports.comparison_plot import plot_comparison
from rl_cluster_benchmark.tools.reports.plots import picture_file

WIDTH = 80
HEAVY, LIGHT = "=" * WIDTH, "-" * WIDTH
PICTURE, REPORT = Path("comparison.png"), Path("comparison_report.txt")  # in the current directory
TITLE = "SEQUENTIAL VS PARALLEL TRAINING COMPARISON REPORT"


def compare_two(
    sequential: Path, parallel: Path, *, output: Path | None, report: Path | None, unfinished: bool = False,
    x: Axis = "step",
) -> int:  # fmt: skip
    """Print the comparison and write both files; those that the user has not named replace only their like."""
    if not output:
        check_own(PICTURE, MARK_OF_PLOTS, "name a file with --output")
    if not report:
        check_own(REPORT, TITLE.encode(), "name a file with --report")
    output, report = picture_file(output or PICTURE), report or REPORT
    check_output("--output", output)
    check_output("--report", report)
    one = _load("--sequential", sequential, unfinished)
    other = _load("--parallel", parallel, unfinished)
    if not one.config.is_sequential or other.config.is_sequential:
        raise UserError(
            f"--sequential {sequential} is a {one.mode} run and --parallel {parallel} a {other.mode} one; "
            "`rlcb compare DIR DIR` compares any two."
        )
    print("\n".join(two_run_table(one, other)))
    comparison = Comparison.of([one, other], [])
    plot_comparison(comparison, output, x, title="Sequential and parallel training")
    write_output(report, ("\n".join(two_run_report(one, other)) + "\n").encode())
    print(f"\nPlot saved to: {output}\nReport saved to: {report}")
    for warning in [*differences(one, other), *comparison.warnings()]:
        print(plain(f"Note: {warning}"))
    return 0


def _load(flag: str, path: Path, unfinished: bool) -> RunRecord:
    try:
        run = load_run(path)
        require_usable(run, unfinished)
        return run
    except UnusableRunError as error:
        raise UserError(plain(f"{flag} {path}: {error}.")) from None


def differences(one: RunRecord, other: RunRecord) -> list[str]:
    """Say what the runs differ by besides the mode."""
    found = []
    if LearningTask(one.config.env) != LearningTask(other.config.env):
        tasks = f"{LearningTask(one.config.env)} and {LearningTask(other.config.env)}"
        found.append(f"The runs are of different tasks ({tasks}): neither their speeds nor their rewards compare.")
    if one.algorithm != other.algorithm:
        found.append(f"The runs are of different algorithms: {one.algorithm} and {other.algorithm}.")
    return found


def _ratios(one: RunRecord, other: RunRecord) -> tuple[str, str]:
    """Return the speed-up and the gain in steps per hour; nothing where their speeds or their tasks do not compare."""
    if not speeds_compare([one, other]) or LearningTask(one.config.env) != LearningTask(other.config.env):
        return NOTHING, NOTHING
    mine, theirs = one.summary.avg_fps, other.summary.avg_fps
    speedup, gain = f"{theirs / mine:.2f}x" if mine > 0 else NOTHING, NOTHING
    hourly, others_hourly = steps_per_hour(one), steps_per_hour(other)
    if hourly and others_hourly is not None:
        gain = f"{100 * (others_hourly / hourly - 1):.1f}%"
    return speedup, gain


def steps_per_hour(run: RunRecord) -> float | None:
    hours = run.summary.duration_hours
    return run.summary.total_timesteps / hours if hours > 0 else None


def two_run_table(one: RunRecord, other: RunRecord) -> list[str]:
    a, b = one.summary, other.summary
    speedup, gain = _ratios(one, other)
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
        _row("Speedup (Parallel/Sequential)", NOTHING, speedup),
        _row("Final FPS", whole(a.final_fps), whole(b.final_fps)),
        *_section("Reward Metrics"),
        _row("Initial Reward", decimal(a.initial_reward), decimal(b.initial_reward)),
        _row("Final Reward", decimal(a.final_reward), decimal(b.final_reward)),
        _row("Best Reward", decimal(a.best_reward), decimal(b.best_reward)),
        *_section("Resource Usage"),
        _row("Peak Memory (GB)", decimal(a.peak_memory_gb), decimal(b.peak_memory_gb)),
        *_section("Efficiency Metrics"),
        _row("Timesteps/Hour", whole(steps_per_hour(one)), whole(steps_per_hour(other))),
        _row("Efficiency Gain (%)", NOTHING, gain),
        HEAVY,
    ]


def two_run_report(one: RunRecord, other: RunRecord) -> list[str]:
    speedup, gain = _ratios(one, other)
    lines = [HEAVY, TITLE, HEAVY, ""]
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
    lines.append(f"Speedup (FPS): {speedup}")
    lines.append(f"Efficiency Gain: {gain}")
    return lines


def _section(title: str) -> list[str]:
    return ["", title, LIGHT]


def _row(name: str, one: str, other: str) -> str:
    return f"{name:<40} {one:<20} {other:<20}"
