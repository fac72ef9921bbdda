"""What was measured: one row a library, the work of each beside the job's, the table, the picture."""

from __future__ import annotations

import io
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from job import NORMALISED, NUM_LEVELS, PARAMETERS, Job
from measure import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "ours"
TOLERANCE = 0.05  # of counts per environment step: episodes end, batches are rounded
QUIET = 0.05  # of the machine's cores may be busy with something else
Row = dict[str, Any]


def record(peer: str, number: int, outcome: Measurement | str) -> dict[str, Any]:
    """One run as it is kept in peers.json: a measurement, or why there is none."""
    kept: dict[str, Any] = {"peer": peer, "round": number}
    return kept | ({"failed": outcome} if isinstance(outcome, str) else asdict(outcome))


def expected(job: Job) -> dict[str, Any]:
    """The work that makes the job the same."""
    return {
        "parameters": PARAMETERS,
        "samples_per_step": float(job.epochs),
        "optimizer_steps_per_step": job.epochs / job.batch_size,
        "num_envs": job.num_envs,
        "levels": f"coinrun easy, {NUM_LEVELS} from 0",
        "reward": NORMALISED,
        "precision": "float32",
    }


def differences(facts: dict[str, Any], job: Job) -> list[str]:
    """Keys in which a library did other work than the job."""
    found = []
    for key, wanted in expected(job).items():
        got = facts.get(key)
        if isinstance(wanted, float) and isinstance(got, float):
            same = abs(got - wanted) <= TOLERANCE * wanted
        else:
            same = got == wanted
        if not same:
            found.append(key)
    return found


def rows(report: dict[str, Any]) -> list[Row]:
    """Medians over the rounds; the fastest library first. Ratios compare runs of the same round."""
    job = Job(**report["job"])
    ours = {run["round"]: run["fps"] for run in report["runs"] if run["peer"] == OURS and "fps" in run}
    found: list[Row] = []
    for peer in dict.fromkeys(run["peer"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["peer"] == peer]
        good = [run for run in runs if "fps" in run]
        if not good:
            found.append({"peer": peer, "failed": runs[-1]["failed"]})
            continue
        ratios = [ours[run["round"]] / run["fps"] for run in good if run["round"] in ours]
        facts = good[-1]["facts"]
        found.append(
            {
                "peer": peer,
                "fps": statistics.median(run["fps"] for run in good),
                "all_fps": [run["fps"] for run in good],
                "ours_over_it": statistics.median(ratios) if ratios else None,
                "memory": max(run["memory"] for run in good),
                "busy_cores": statistics.median(run["busy_cores"] for run in good),
                "others_busy": max(run["others_busy"] for run in good),
                "facts": facts,
                "differs": differences(facts, job),
                "failures": [run["failed"] for run in runs if "failed" in run],
            }
        )
    return sorted(found, key=lambda row: -row.get("fps", 0.0))


def markdown(report: dict[str, Any]) -> str:
    """The whole result as text that is also Markdown."""
    job, titles = Job(**report["job"]), report["titles"]
    measured = [row for row in rows(report) if "fps" in row]
    cores = report["machine"]["cores"]
    speed = [["", "env steps/s", "each round", "ours / it", "memory GB", f"cores busy of {cores}", "runs as"]]
    work = [["work", "parameters", "samples/step", "opt. steps per 1,000", "envs", "levels", "reward", "precision"]]
    work.append(["the job", *_work_cells(expected(job), [])])
    for row in measured:
        name, facts = titles[row["peer"]], row["facts"]
        ratio = f"{row['ours_over_it']:.2f}" if row["ours_over_it"] is not None else "-"
        each = ", ".join(f"{fps:,.0f}" for fps in row["all_fps"])
        memory, busy = f"{row['memory'] / 1e9:.1f}", f"{row['busy_cores']:.2f}"
        speed.append([name, f"{row['fps']:,.0f}", each, ratio, memory, busy, facts.get("setting", "")])
        work.append([name, *_work_cells(facts, row["differs"])])
    lines = [
        f"## {job.algorithm.upper()}: {job.num_envs} environments x {job.n_steps} steps, {job.epochs} epochs, "
        f"batches of {job.batch_size:,}",
        f"{report['machine']['cpu']}, {cores} cores, {report['date']}, {report['seconds']:g} s or one update each, "
        f"rounds: {report['rounds']}; ≠ marks work that differs from the job's.",
        "",
        *_table(speed),
        "",
        *_table(work),
        "",
        *(f"- {titles[row['peer']]}: {_versions(row['facts'])}" for row in measured),
    ]
    failed = [f"- {titles[row['peer']]}: not measured: {row['failed']}" for row in rows(report) if "failed" in row]
    failed += [f"- {titles[row['peer']]}: one run failed: {why}" for row in measured for why in row["failures"]]
    failed += [f"- {titles[peer]}: not measured: {why}" for peer, why in report["left_out"].items()]
    disturbed = [
        f"- {titles[row['peer']]}: not alone: other processes kept {row['others_busy']:.2f} cores busy. Measure again."
        for row in measured
        if row["others_busy"] > QUIET * cores
    ]
    return "\n".join([*lines, *failed, *disturbed]) + "\n"


def _work_cells(facts: dict[str, Any], differs: list[str]) -> list[str]:
    texts = {
        "parameters": f"{facts.get('parameters', 0):,}",
        "samples_per_step": f"{facts.get('samples_per_step', 0):.2f}",
        "optimizer_steps_per_step": f"{1000 * facts.get('optimizer_steps_per_step', 0):.2f}",
        **{key: str(facts.get(key, "?")) for key in ("num_envs", "levels", "reward", "precision")},
    }
    return [("≠ " if key in differs else "") + text for key, text in texts.items()]


def _versions(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())


def _table(cells: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def draw(reports: list[dict[str, Any]]) -> bytes:
    """A bar for every library, a panel for every algorithm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(reports), 4), layout="constrained")
    for axis, report in zip(figure.subplots(1, len(reports), squeeze=False)[0], reports, strict=True):
        _bars(axis, report)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def _bars(axis: Axes, report: dict[str, Any]) -> None:
    measured = [row for row in rows(report) if "fps" in row][::-1]
    names = [report["titles"][row["peer"]] for row in measured]
    colours = ["tab:blue" if row["peer"].startswith(OURS) else "tab:gray" for row in measured]
    bars = axis.barh(names, [row["fps"] for row in measured], color=colours)
    axis.bar_label(bars, [f"{row['fps']:,.0f}" for row in measured], padding=3)
    for place, row in enumerate(measured):
        axis.plot(row["all_fps"], [place] * len(row["all_fps"]), "k.", markersize=4)
    axis.margins(x=0.15)
    axis.set(title=report["job"]["algorithm"].upper(), xlabel=f"env steps / s, {report['machine']['cores']} cores")
