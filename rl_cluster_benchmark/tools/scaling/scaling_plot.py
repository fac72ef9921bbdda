"""A sweep over the number of workers as a PNG: speed, speed-up, efficiency, where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.tools.reports.plots import draw_counts_axis, open_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOGETHER, INDEPENDENT, IDEAL = "tab:blue", "tab:orange", "silver"


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw the picture of a scaling.json."""
    rows = report["rows"]
    workers = [row["workers"] for row in rows]
    figure, axes = open_figure(1, 4, (17, 4.2))
    speed, speedup, efficiency, time = axes[0]
    ideal = {"color": IDEAL, "linestyle": "--", "label": "ideal"}

    speed.plot(workers, [w * rows[0]["independent_fps"] for w in workers], **ideal)
    _curves(speed, rows, "fps", "independent_fps")
    speed.set(title="Speed", ylabel="environment steps / s")
    speedup.plot(workers, workers, **ideal)
    _curves(speedup, rows, "speedup", "independent_speedup")
    speedup.set(title="Speed-up", ylabel="times one worker")
    efficiency.axhline(100, **ideal)
    _curves(efficiency, rows, "efficiency", "independent_efficiency", scale=100)
    of_machine = [100 * row["of_machine"] for row in rows]
    efficiency.plot(workers, of_machine, "s:", color="tab:green", label="together / independent")
    efficiency.set(title="Efficiency", ylabel="%")
    for axis in (speed, speedup, efficiency):
        draw_counts_axis(axis, workers, "workers")
        axis.set_ylim(bottom=0)
    _bars(time, rows)
    envs = f"{rows[0]['num_envs']} environments" + (" per worker" if report["scaling"] == "weak" else " in all")
    figure.suptitle(f"{report['algorithm']} on {report['env']}, {envs} ({report['cpu_model']})")
    save_figure(figure, file)


def _curves(axis: Axes, rows: list[dict[str, Any]], together: str, independent: str, scale: float = 1) -> None:
    workers = [row["workers"] for row in rows]
    axis.plot(workers, [scale * row[independent] for row in rows], "o-", color=INDEPENDENT, label="independent runs")
    axis.plot(workers, [scale * row[together] for row in rows], "o-", color=TOGETHER, label="workers together")


def _bars(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Where the workers' time goes, from the last round of each."""
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for phase in rows[0]["rounds"][-1]["phase_shares"]:
        heights = [100 * row["rounds"][-1]["phase_shares"][phase] for row in rows]
        axis.bar(places, heights, bottom=bottom, label=phase)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.set_xticks(list(places), [str(row["workers"]) for row in rows])
    axis.set(title="Time of the workers", xlabel="workers", ylabel="%", ylim=(0, 100))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
