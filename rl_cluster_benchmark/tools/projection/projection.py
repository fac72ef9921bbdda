"""`rlcb scaling --project`: from measurements on this machine to many machines, as a table, JSON, CSV and a picture."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.config.traits import TRAITS_BY_LABEL
from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.core.atomic_files import write_atomically, write_json
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.tools.projection import inputs
from rl_cluster_benchmark.tools.projection.inputs import Measured
from rl_cluster_benchmark.tools.reports.plots import draw_counts_axis, open_figure, save_figure
from rl_cluster_benchmark.tools.scaling import model
from rl_cluster_benchmark.tools.scaling.results_folder import results_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = ("projection.json", "projection.csv", "projection.png")
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
GOOD = 0.8
COLOURS = {
    "allreduce": "tab:blue", "allreduce bfloat16": "tab:red", "local_sgd": "tab:orange", "async": "tab:green",
}  # fmt: skip
WIDTH = 62  # characters of the text beside the plot


@dataclass(frozen=True)
class ProjectionSettings:
    nodes: Sequence[int]
    seconds: float
    output_dir: Path
    overwrite: bool
    measured: Path | None  # an earlier projection.json, instead of measuring
    network: Path | None  # what `rlcb doctor --cluster --json` wrote
    bandwidth: float | None  # bits per second
    round_trip: float | None  # seconds
    spread: float | None  # relative standard deviation of the machines' speeds


def project(config: Config, settings: ProjectionSettings, signals: Signals) -> int:
    """Measure, project, print, write; return the exit status."""
    output, overwrite = settings.output_dir, settings.overwrite
    with results_folder(output, FILES, overwrite=overwrite, what="a projection") as folder:
        given = inputs.from_doctor(settings.network) if settings.network else None
        with contextlib.suppress(KeyboardInterrupt):
            if settings.measured is not None:
                measured = Measured.from_file(settings.measured)
            else:
                print(
                    f"Training on this machine alone for {settings.seconds:g} s after the first update ...", flush=True
                )
                measured = inputs.measure_here(config, settings.seconds, folder, signals.has_come)
            report = make_report(measured, settings, given)
            print("\n".join(lines(report)), flush=True)
            write_files(output, report)
            print(f"\nSaved {', '.join(str(output / name) for name in FILES)}", flush=True)
    return signals.status


def make_report(
    measured: Measured, settings: ProjectionSettings, given: tuple[model.Network, float] | None = None
) -> dict[str, Any]:
    between = settings.spread if settings.spread is not None else given[1] if given else measured.spread.between
    spread = replace(measured.spread, between=between)
    networks = _networks(measured, settings, given[0] if given else None)
    strategies = model.STRATEGIES if TRAITS_BY_LABEL[measured.run["algorithm"]].is_in_step else (model.ASYNCHRONOUS,)
    rows = [
        _row(name, strategy, count, measured, network, spread)
        for name, network in networks.items()
        for strategy in strategies
        for count in settings.nodes
    ]
    return {
        "measured": measured.to_dict(),
        "spread": vars(spread),
        "networks": {name: vars(network) for name, network in networks.items()},
        "strategies": list(strategies),
        "nodes": list(settings.nodes),
        "rows": rows,
        "assumptions": list(model.ASSUMPTIONS),
        "finished_at": text.timestamp(),
    }


def _networks(
    measured: Measured, settings: ProjectionSettings, given: model.Network | None
) -> dict[str, model.Network]:
    if given is not None:
        return {"measured": given}
    known = inputs.TYPICAL
    if settings.bandwidth is not None or settings.round_trip is not None:
        figures = (settings.round_trip or 0.0, settings.bandwidth or 1e15)
        known = {f"{figures[1] / 1e9:g} Gbit/s, {1e3 * figures[0]:g} ms": figures}
        if settings.bandwidth is None:
            known = {f"{1e3 * figures[0]:g} ms": figures}
    return {
        name: inputs.typical(measured.software, round_trip=round_trip, bits_per_second=rate)
        for name, (round_trip, rate) in known.items()
    }


def _row(
    name: str, strategy: str, nodes: int, measured: Measured, network: model.Network, spread: model.Spread
) -> dict[str, Any]:
    found = model.project(strategy, nodes, measured.work, network, spread, sync_every=measured.sync_every)
    return {
        "network": name,
        "strategy": strategy,
        "nodes": nodes,
        "minibatch": measured.batch * (nodes if strategy in model.IN_STEP else 1),
        "steps_per_second": found.steps_per_second,
        "efficiency": found.efficiency,
        "update_seconds": found.seconds,
        "work_seconds": found.work,
        "waiting_seconds": found.waiting,
        "communication_seconds": found.communication,
        "updates_between_averages": model.updates_between_averages(
            strategy, nodes, measured.work, network, sync_every=measured.sync_every
        ),
    }


def rows_of(report: dict[str, Any], network: str, strategy: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if (row["network"], row["strategy"]) == (network, strategy)]


def facts(report: dict[str, Any]) -> list[str]:
    """Return in sentences what was measured, and so stands behind every figure."""
    measured = report["measured"]
    work, run, software, spread = measured["work"], measured["run"], measured["software"], report["spread"]
    seconds = work["rollout_seconds"] + work["minibatches"] * work["minibatch_seconds"]
    return [
        f"{run['algorithm']} on {run['env']}, one machine with {run['num_workers']} workers ({run['cpu_model']}): "
        f"{work['steps'] / seconds:,.0f} steps/s, {run['updates']} updates measured",
        f"An update: {seconds:.2f} s = rollout {work['rollout_seconds']:.2f} s + {work['minibatches']} minibatches of "
        f"{measured['batch']:,} samples, {1e3 * work['minibatch_seconds']:.1f} ms each; "
        f"a gradient has {work['vector_bytes'] / 1e6:.1f} MB",
        f"Speed varies by {spread['jitter']:.1%} from update to update, and is taken to differ by "
        f"{spread['between']:.1%} between machines",
        f"Gloo itself, between two processes here: {1e6 * software['latency']:.0f} µs a hop, "
        f"{software['bandwidth'] * 8 / 1e9:.1f} Gbit/s",
    ]


def lines(report: dict[str, Any]) -> list[str]:
    """Return the whole answer as it is printed."""
    out = ["", *facts(report)]
    strategies = report["strategies"]
    for network in report["networks"]:
        size = "minibatch" if len(strategies) == 1 else f"minibatch ({strategies[0]})"
        head = ["machines", size, *strategies]
        by_strategy = [rows_of(report, network, strategy) for strategy in strategies]
        cells = [
            [f"{same[0]['nodes']:,}", f"{same[0]['minibatch']:,}"]
            + [f"{row['steps_per_second']:,.0f} ({row['efficiency']:.0%})" for row in same]
            for same in zip(*by_strategy, strict=True)
        ]
        out += ["", f"{network}: steps/s (share of that many times one machine)", *text.table(head, cells)]
        out.append(f"{GOOD:.0%} is kept up to {reach(report, network)}.")
    return [*out, "", "Assumed:", *(f"- {sentence}" for sentence in report["assumptions"])]


def reach(report: dict[str, Any], network: str) -> str:
    """Say how many machines each strategy is good for."""
    words = []
    for strategy in report["strategies"]:
        kept = 1
        for row in rows_of(report, network, strategy):
            if row["efficiency"] < GOOD:
                break
            kept = row["nodes"]
        words.append(f"{kept:,} {'machine' if kept == 1 else 'machines'} with {strategy}")
    return ", ".join(words)


def write_files(folder: Path, report: dict[str, Any]) -> None:
    write_json(folder / "projection.json", report)
    write_atomically(folder / "projection.csv", text.as_csv(report["rows"]).encode())
    _draw(report, folder / "projection.png")


def _draw(report: dict[str, Any], file: Path) -> None:
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
    beside = words.text(0, 1, _beside(report), va="top", ha="left", fontsize=9, transform=words.transAxes)
    beside.set_in_layout(False)  # it is longer than this row of the grid
    run = report["measured"]["run"]
    figure.suptitle(f"Projected, not measured: {run['algorithm']} on {run['env']} on many machines like this one")
    save_figure(figure, file)


def _curves(axis: Axes, report: dict[str, Any], network: str, key: str, scale: float = 1) -> None:
    for strategy in report["strategies"]:
        rows = rows_of(report, network, strategy)
        nodes, values = [row["nodes"] for row in rows], [scale * row[key] for row in rows]
        style = "o--" if strategy == "allreduce bfloat16" else "o-"  # often right on top of allreduce
        axis.plot(nodes, values, style, markersize=3, color=COLOURS.get(strategy), label=strategy)


def _beside(report: dict[str, Any]) -> str:
    def block(title: str, sentences: Sequence[str]) -> list[str]:
        wrapped = [textwrap.fill(sentence, WIDTH, subsequent_indent="   ") for sentence in sentences]
        return [title, *wrapped, ""]

    return "\n".join(
        [*block("Measured here", [f"• {fact}" for fact in facts(report)]),
         *block("Assumed", [f"• {sentence}" for sentence in report["assumptions"]])]
    )  # fmt: skip
