#!/usr/bin/env python3
"""What actors and learners bring: IMPALA in one process with all threads, IMPALA parallel and A3C parallel, in turns.

python bench/asynchronous.py [--env coinrun] [--rounds 3] [--timesteps 100000] [--num-envs 64] [--n-steps 32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNS = {
    "IMPALA sequential": ("--config", "impala_sequential"),
    "IMPALA parallel": ("--config", "impala_parallel", "--set", "impala.num_actors=auto"),
    "A3C parallel": ("--config", "a3c_parallel"),
}


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of one run in a process of its own."""
    steps = [] if name.startswith("A3C") else ["--set", f"training.n_steps={args.n_steps}"]
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "rl_cluster_benchmark", "train", *RUNS[name], "--env", args.env, *steps]
        call += ["--num-envs", str(args.num_envs), "--total-timesteps", str(args.timesteps), "--output-dir", folder]
        call += [part for text in args.set for part in ("--set", text)]
        done = subprocess.run(call, check=False, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        if done.returncode:
            sys.exit(f"{' '.join(call)}\n{done.stdout}{done.stderr}")
        return json.loads(Path(folder, "training_summary.json").read_text())


def line(name: str, summary: dict[str, Any]) -> str:
    text = f"  {name:<18} {summary['final_fps']:>7,.0f} env steps/s at the end, {summary['avg_fps']:>7,.0f} on average"
    means = summary["asynchrony"]
    if "learner_idle" in means:
        text += (
            f"; {summary['num_workers']} actors idle {means['actor_idle']:.0%}, "
            f"{summary['num_learners']} learners idle {means['learner_idle']:.0%}"
        )
    if means:
        text += f"; policy lag {means['policy_lag']:.1f} (at most {means['policy_lag_max']:.0f})"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="coinrun", help="default: coinrun")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; default: 3")
    parser.add_argument("--timesteps", type=int, default=100_000, help="env steps of each run; default: 100000")
    parser.add_argument("--num-envs", type=int, default=64, help="environments in all; default: 64")
    parser.add_argument("--n-steps", type=int, default=32, help="length of IMPALA's unrolls; default: 32")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    args = parser.parse_args(argv)
    ratios = []
    for number in range(args.rounds):
        print(f"round {number + 1}", flush=True)
        fps = {}
        for name in RUNS:
            summary = measure(name, args)
            fps[name] = summary["final_fps"]
            print(line(name, summary), flush=True)
        ratios.append(fps["IMPALA parallel"] / fps["IMPALA sequential"])
    print(f"IMPALA parallel over sequential: {statistics.median(ratios):.2f} (median of {args.rounds})")


if __name__ == "__main__":
    main()
