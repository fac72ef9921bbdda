"""A profile on the screen and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.atomic_files import write_json
from rl_cluster_benchmark.core.text import NOTHING, table
from rl_cluster_benchmark.tools.analysis.runs import RunRecord
from rl_cluster_benchmark.tools.profile.figures import PASSES, Process, Profile
from rl_cluster_benchmark.tools.profile.peak import PRECISIONS
from rl_cluster_benchmark.tools.profile.verdict import Verdict

JSON, FLAME = "profile.json", "flame.svg"
FILES = (JSON, FLAME)
OPERATORS = 15  # rows on the screen; the JSON has all
PHASES = ("env", "inference", "update", "communication", "waiting", "other")
PASS_NAMES = {"inference": "acting: forward", "forward": "learning: forward", "backward": "learning: backward"}


def show(profile: Profile, verdict: Verdict, config: Config) -> None:
    run = profile.run
    print(
        f"\n{config.traits.label} {config.mode} on {config.env.name}: {profile.fps:,.0f} steps/s, "
        f"{profile.precision}, network: {profile.engine}, {profile.threads} thread(s) in each of "
        f"{len(profile.processes)} process(es); {run['peak_memory_gb']:.2f} GB"
    )
    blocks = [
        ("Time by phase", _phases(profile)),
        ("Processes, per second", _usage(profile)),
        ("Cores", [_cores(profile)]),
        ("Network against the peak of this machine (matrix multiplication)", _passes(profile)),
        ("Memory", _memory(profile)),
    ]
    for role in ("worker", "learner", "actor"):
        traced = [process for process in profile.of_role(role) if process.operators]
        blocks += [(f"Time by operator, {process.name} (torch's profiler)", _operators(process)) for process in traced]
    for title, lines in blocks:
        print("", title, *lines, sep="\n")
    print("", "What limits this run", *verdict.sentences, "", sep="\n", flush=True)


def show_finished(run: RunRecord, profile: Profile, verdict: Verdict) -> None:
    """Print what the files of a run that is over tell."""
    print(f"{run.algorithm} {run.mode} on {run.config.env.name}, {run.state}: {profile.fps:,.0f} steps/s")
    means = {process.role: process for process in profile.processes}  # all of a role are like the mean of it
    rows = [[f"mean {role}", *(f"{p.shares[name]:.1%}" for name in PHASES)] for role, p in means.items()]
    print("", "Time by phase", *table(["", *PHASES], rows), sep="\n")
    print("", "What limits this run", *verdict.sentences, sep="\n", flush=True)


def _phases(profile: Profile) -> list[str]:
    rows = [[p.name, *(f"{p.shares[name]:.1%}" for name in PHASES)] for p in profile.processes]
    return table(["", *PHASES], rows)


def _usage(profile: Profile) -> list[str]:
    head = ["", "CPU", "page faults", "from disk", "waits", "preemptions"]
    keys = ("minor_faults", "major_faults", "waits", "preemptions")
    rows = [[p.name, f"{p.cpu:.2f}", *(f"{p.usage[key]:,.0f}" for key in keys)] for p in profile.processes]
    return [*table(head, rows), "CPU in cores; waits and preemptions are voluntary and forced context switches."]


def _cores(profile: Profile) -> str:
    busy = " ".join(f"{share:.0%}" for share in profile.cores)
    return f"busy: {busy}; {profile.own_cpu:.2f} cores by this run, {profile.others_cpu:.2f} by anything else"


def _passes(profile: Profile) -> list[str]:
    cost, rows = profile.cost, []
    assert cost is not None
    for kind in PASSES:
        rate = profile.rate(kind)
        flops = cost.backward_flops if kind == "backward" else cost.forward_flops
        cells = [NOTHING] * 3
        if rate is not None:
            share = NOTHING if rate.of_peak is None else f"{rate.of_peak:.1%}"
            cells = [f"{rate.samples:,.0f}", f"{rate.gflops:.1f}", share]
        rows.append([PASS_NAMES[kind], f"{flops / 1e6:.2f}", *cells])
    peak = profile.peak
    lines = table(["", "MFLOP/sample", "samples/s", "GFLOP/s", "of peak"], rows)
    lines.append(f"in each process, while it is in such a pass; {cost.num_parameters:,} parameters")
    if peak is None:
        return lines
    for where, figures in (("one core", peak.one_core), (f"all {peak.cores} cores", peak.all_cores)):
        speeds = ", ".join(f"{name} {figures[name]:,.0f} GFLOP/s" for name in PRECISIONS)
        lines.append(f"peak of {where}: {speeds}")
    return lines


def _memory(profile: Profile) -> list[str]:
    low, high = profile.traffic()
    lines = [
        f"traffic, estimated: {low:.2f} GB/s if a pass stays in the cache, {high:.2f} GB/s if every layer's tensors go "
        "through memory",
    ]
    if peak := profile.peak:
        one, everything = peak.one_core["memory"], peak.all_cores["memory"]
        lines.append(f"copying reaches {one:.1f} GB/s on one core, {everything:.1f} GB/s on all")
    return lines


def _operators(process: Process) -> list[str]:
    rows = []
    for row in process.operators[:OPERATORS]:
        share = f"{row['seconds'] / process.traced_seconds:.1%}"
        rows.append([row["name"], share, f"{1e3 * row['seconds']:,.1f}", f"{row['calls']:,}"])
    return table(["operator", "of the time", "ms", "calls"], rows)


def write(folder: Path, profile: Profile, verdict: Verdict, config: Config) -> None:
    low, high = profile.traffic()
    rates = {kind: profile.rate(kind) for kind in PASSES}
    record: dict[str, Any] = {
        "bottleneck": verdict.bottleneck,
        "verdict": verdict.sentences,
        "fps": profile.fps,
        "processes": [dataclasses.asdict(process) | {"name": process.name} for process in profile.processes],
        "cores": profile.cores,
        "others_cpu": profile.others_cpu,
        "passes": {kind: rate and dataclasses.asdict(rate) | {"of_peak": rate.of_peak} for kind, rate in rates.items()},
        "network": dataclasses.asdict(profile.cost) if profile.cost else None,
        "peak": dataclasses.asdict(profile.peak) if profile.peak else None,
        "memory_traffic_gb_per_second": {"at_least": low, "at_most": high},
        "precision": profile.precision,
        "engine": profile.engine,
        "config": config.model_dump(mode="json"),
        "run": profile.run,
    }
    write_json(folder / JSON, record)


def merge_traces(files: Sequence[Path]) -> str:
    """Return one trace with the events of all processes side by side."""
    traces = [json.loads(file.read_text()) for file in files]
    merged = traces[0]
    for trace in traces[1:]:
        merged["traceEvents"] += trace["traceEvents"]
    return json.dumps(merged)
