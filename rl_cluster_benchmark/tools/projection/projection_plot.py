"""A projection as a PNG: for each network steps per second and efficiency over machines, and beside them what it
takes for granted."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "allreduce": "tab:blue", "allreduce bfloat16": "tab:red", "local_sgd": "tab:orange", "async": "tab:green",
}  # fmt: skip
WIDTH = 62  # characters of the text beside the plot


def draw(report: dict[str, Any], facts: Sequence[str]) -> bytes:
    """The picture of a projection.json."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Plots need matplotlib: pip install matplotlib.") from None

    networks = list(report["networks"])
    figure = Figure(figsize=(17, max(7.0, 3.6 * len(networks))), layout="constrained")
    grid = figure.add_gridspec(len(networks), 3, width_ratios=(1, 1, 0.85))
    for index, network in enumerate(networks):
        speed, efficiency = figure.add_subplot(grid[index, 0]), figure.add_subplot(grid[index, 1])
        _curves(speed, report, network, "steps_per_second")
        one = next(row for row in report["rows"] if row["nodes"] == min(report["nodes"]))
        ideal = [n * one["steps_per_second"] / one["nodes"] for n in report["nodes"]]
        speed.plot(report["nodes"], ideal, "--", color="silver", label="ideal", zorder=0)
        speed.set(title=f"{network}: speed", ylabel="environment steps / s", yscale="log")
        _curves(efficiency, report, network, "efficiency", scale=100)
        efficiency.set(title=f"{network}: efficiency", ylabel="% of that many times one machine", ylim=(0, 104))
        for axis in (speed, efficiency):
            axis.set_xscale("log", base=2)
            axis.set_xticks(report["nodes"], [str(n) for n in report["nodes"]])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(frameon=False, fontsize=8)
            axis.set_xlabel("machines")
    words = figure.add_subplot(grid[:, 2])
    words.axis("off")
    words.text(0, 1, _beside(report, facts), va="top", ha="left", fontsize=9, transform=words.transAxes)
    run = report["measured"]["run"]
    figure.suptitle(f"Projected, not measured: {run['algorithm']} on {run['env']} on many machines like this one")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()


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
