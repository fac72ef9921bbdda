"""Groups of runs in four panels: reward, speed, policy loss, and steps against wall-clock time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.curves import REWARD, Axis, Curve, curve
from rl_cluster_benchmark.tools.analysis.groups import LearningTask
from rl_cluster_benchmark.tools.reports.plots import draw_published, open_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# (title, axis label, metric)
PANELS = (
    ("Episode rewards", "mean of 100 episodes", REWARD),
    ("Training speed", "environment steps / s", "charts/SPS"),
    ("Policy loss", "", "losses/policy_loss"),
)
X_LABELS = {"step": "environment steps", "time": "minutes"}


def plot_comparison(comparison: Comparison, output: Path, x: Axis = "step", title: str | None = None) -> Path:
    """Draw a row of four panels for each task; return the PNG's path."""
    tasks = comparison.tasks
    columns = 2 if len(tasks) == 1 else 4
    rows = 2 if len(tasks) == 1 else len(tasks)
    figure, axes = open_figure(rows, columns, figsize=(6.5 * columns, 4.2 * rows))
    from matplotlib.ticker import EngFormatter

    for index, task in enumerate(tasks):
        panels: list[Axes] = list(axes.flat) if len(tasks) == 1 else list(axes[index])
        for axis, (name, label, metric) in zip(panels[:3], PANELS, strict=True):
            _draw_panel(axis, comparison, task, metric, x)
            axis.set_title(name if len(tasks) == 1 else f"{task.game}: {name.lower()}")
            axis.set_ylabel(label)
            axis.set_xlabel(X_LABELS[x])
            if x == "step":
                axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if x == "step":
            draw_published(panels[0], task.env, comparison.longest_run(task))
        panels[0].legend(frameon=False, fontsize="small")
        panels[1].set_ylim(bottom=0)
        _draw_progress(panels[3], comparison, task)
        panels[3].set_title("Training progress" if len(tasks) == 1 else f"{task.game}: training progress")
        panels[3].yaxis.set_major_formatter(EngFormatter(sep=""))
    figure.suptitle(title or ", ".join(map(str, tasks[:4])))
    return save_figure(figure, output)


def _draw_panel(axis: Axes, comparison: Comparison, task: LearningTask, metric: str, x: Axis) -> None:
    for index, variant in enumerate(comparison.variants):
        group = comparison.group(variant, task)
        line = curve(group, metric, x) if group else None
        if group is None or line is None or not len(line):
            continue
        label = variant if len(group.runs) == 1 else f"{variant}, {len(group.runs)} seeds"
        _draw_curve(axis, line, f"C{index}", label, 1 / 60 if x == "time" else 1.0)
    axis.grid(alpha=0.3)
    axis.set_xlim(left=0)


def _draw_curve(axis: Axes, line: Curve, color: str, label: str, scale: float) -> None:
    """Draw a curve, faintly as far as too few episodes have ended: those are short ones only."""
    early = int(line.early.sum())
    if early:
        axis.plot(scale * line.x[: early + 1], line.mean[: early + 1], ":", color=color, alpha=0.6)
    axis.plot(scale * line.x[early:], line.mean[early:], color=color, label=label, linewidth=1.5)
    axis.fill_between(scale * line.x[early:], line.low[early:], line.high[early:], color=color, alpha=0.15, linewidth=0)


def _draw_progress(axis: Axes, comparison: Comparison, task: LearningTask) -> None:
    for index, variant in enumerate(comparison.variants):
        group = comparison.group(variant, task)
        for number, run in enumerate(group.runs if group else ()):
            label = variant if number == 0 else None
            axis.plot(run.series["time"] / 60, run.series["step"], color=f"C{index}", label=label, linewidth=1.5)
    axis.set_xlabel("minutes")
    axis.set_ylabel("environment steps")
    axis.grid(alpha=0.3)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
