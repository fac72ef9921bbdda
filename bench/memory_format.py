#!/usr/bin/env python3
"""What channels-last brings: sequential PPO on CoinRun in both memory formats, in turns, as a ratio.

python bench/memory_format.py [--rounds 3] [--timesteps 4096] [--precision auto|float32|bfloat16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FORMATS = ("channels_last", "contiguous")


def measure(memory_format: str, precision: str, timesteps: int) -> float:
    """Env steps per second of one run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "rl_cluster_benchmark", "train", "--config", "ppo_procgen_paper"]
        call += ["--num-envs", "32", "--set", "training.n_steps=64", "--batch-size", "512"]
        call += ["--set", f"hardware.memory_format={memory_format}", "--set", f"hardware.precision={precision}"]
        call += ["--total-timesteps", str(timesteps), "--output-dir", folder]
        subprocess.run(call, check=True, capture_output=True, cwd=Path(__file__).parent.parent)
        summary = json.loads(Path(folder, "training_summary.json").read_text())
    return float(summary["final_fps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each format; default: 3")
    parser.add_argument("--timesteps", type=int, default=6000, help="env steps of each run; default: 6000")
    parser.add_argument("--precision", default="auto", help="auto, float32 or bfloat16; default: auto")
    args = parser.parse_args()
    ratios = []
    for number in range(args.rounds):
        fps = {name: measure(name, args.precision, args.timesteps) for name in FORMATS}
        ratios.append(fps["channels_last"] / fps["contiguous"])
        speeds = ", ".join(f"{name} {value:.0f} env steps/s" for name, value in fps.items())
        print(f"round {number + 1}: {speeds}, ratio {ratios[-1]:.2f}", flush=True)
    print(f"channels-last over contiguous, precision {args.precision}: {statistics.median(ratios):.2f} (median)")


if __name__ == "__main__":
    main()
