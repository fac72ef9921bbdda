"""`rlcb runs`: what lies in a directory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.analysis.runs import LeftOut, RunRecord, UnusableRunError, find_runs, load_run

HEAD = ("run", "algorithm", "mode", "game", "seed", "steps", "FPS", "reward", "time", "state")


def list_runs(directory: str, *, as_json: bool) -> int:
    root = Path(directory)
    if not root.is_dir():
        raise UserError(f"{root} is not a directory; give one that holds runs.")
    runs: list[RunRecord] = []
    unreadable: list[LeftOut] = []
    for path in find_runs(root):
        try:
            runs.append(load_run(path))
        except UnusableRunError as error:
            unreadable.append(LeftOut(path.relative_to(root), str(error)))
    if not runs and not unreadable:
        raise UserError(f"There is no run in {root}; `rlcb train --output-dir {root}/NAME` makes one.")
    print(_json(root, runs, unreadable) if as_json else "\n".join(_table(root, runs, unreadable)))
    return 0


def _table(root: Path, runs: list[RunRecord], unreadable: list[LeftOut]) -> list[str]:
    rows = [
        (
            str(run.path.relative_to(root)),
            run.algorithm,
            run.mode,
            run.game,
            str(run.seed),
            text.whole(run.summary.total_timesteps),
            text.whole(run.summary.avg_fps),
            text.decimal(run.summary.final_reward),
            text.duration(run.summary.duration_hours * 3600),
            run.state if run.reason is None else f"{run.state}: {_first_line(run.reason)}",
        )
        for run in runs
    ]
    lines = text.table(HEAD, rows) if rows else []
    counts = Counter(run.state for run in runs)
    summary = ", ".join(f"{number} {state}" for state, number in counts.items())
    if rows:
        lines += ["", f"{len(runs)} runs: {summary}." if len(runs) > 1 else f"1 run: {summary}."]
    notes = [f"{run.path.relative_to(root)}: {doubt}" for run in runs for doubt in run.doubts]
    notes += [f"{item.path.relative_to(root)}: {item.reason}" for run in runs for item in run.left_out]
    if notes:
        lines += ["", "Notes:", *(f"  {text.plain(note)}" for note in notes)]
    if unreadable:
        lines += ["", "Not readable as runs:", *(f"  {item}" for item in unreadable)]
    return lines


def _json(root: Path, runs: list[RunRecord], unreadable: list[LeftOut]) -> str:
    entries = [
        {
            "run": str(run.path.relative_to(root)),
            "env": run.config.env.name,
            "avg_fps": run.summary.avg_fps,
            "final_reward": run.summary.final_reward,
            **run.facts,
        }
        for run in runs
    ]
    broken = [{"run": str(item.path), "reason": item.reason} for item in unreadable]
    return json.dumps({"runs": entries, "unreadable": broken}, indent=2)


def _first_line(reason: str) -> str:
    line = reason.splitlines()[0] if reason else ""
    return line if len(line) <= 100 else f"{line[:97]}..."
