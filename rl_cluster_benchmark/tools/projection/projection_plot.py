"""A projection as a PNG: for each network steps per second and efficiency over machines, and beside them what it
takes for granted."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.tools.reports.plots import draw_counts_axis, open_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "allreduce": "tab:blue", "allreduce bfloat16": "tab:red", "local_sgd": "tab:orange", "async": "tab:green",
}  # fmt: skip
WIDTH = 62  # characters of the text beside the plot


def draw(report: dict[str, Any], facts: Sequence[str], file: Path) -> None:
    """Draw the picture of a projection.json."""
    networks = list(report["networks"])
    size = (17, max(7.0, 3.6 * len(networks)))
    figure, axes = open_figure(len(networks), 3, size, width_ratios=(1, 1, 0.85))
    for network, (speed, efficiency, words) in zip(networks, axes, strict=True):
        words.axis("off")
        _curves(speed, report, network, "steps_per_second")
        one = next(row for row in report["rows"] if row["nodes"] == min(report["nodes"]))
        ideal = [n * one["steps_per_second"] / one["nodes"] for n in report["nodes"]]
        speed.plot(report["nodes"], ideal, "--", color="silver", label="ideal", zorder=0)
        speed.set(title=f"{network}: speed", ylabel="environment steps / s", yscale="log")
        _curves(efficiency, report, network, "efficiency", scale=100)
        efficiency.set(title=f"{network}: efficiency", ylabel="% of that many times one machine", ylim=(0, 104))
        for axis in (speed, efficiency):
            draw_counts_axis(axis, report["nodes"], "machines")
    words = axes[0, 2]
    text = words.text(0, 1, _beside(report, facts), va="top", ha="left", fontsize=9, transform=words.transAxes)
    text.set_in_layout(False)  # it is longer than this row of the grid
    run = report["measured"]["run"]
    figure.suptitle(f"Projected, not measured: {run['algorithm']} on {run['env']} on many machines like this one")
    save_figure(figure, file)


def _curves(axis: Axes, report: dict[str, Any], network: str, key: str, scale: float = 1) -> None:
    for strategy in report["strategies"]:
        rows = [row for row in report["rows"] if (row["network"], row["strategy"]) == (network, strategy)]
        nodes, values = [row["nodes"] for row in rows], [scale * row[key] for row in rows]
        style = "o--" if strategy == "allreduce bfloat16" else "o-"  # often right on top of allreduce
        axis.plot(nodes, values, style, markersize=3, color=COLOURS.get(strategy), label=strategy)


def _beside(report: dict[str, Any], facts: Sequence[str]) -> str:
    def block(title: str, sentences: Sequence[str]) -> list[str]:
        wrapped = [textwrap.fill(sentence, WIDTH, subsequent_indent="   ") for sentence in sentences]
        return [title, *wrapped, ""]

    return "\n".join(
        [*block("Measured here", [f"• {fact}" for fact in facts]),
         *block("Assumed", [f"• {sentence}" for sentence in report["assumptions"]])]
    )  # fmt: skip
