#!/usr/bin/env python3
"""What the memory-mapped replay costs: milliseconds to keep an unroll and to draw one, beside those to learn from it.

python bench/replay.py [--folder .] [--size 2000] [--n-steps 128] (2000 unrolls of 128 frames are 3.2 GB)
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.execution.actor_learner.replay import ReplayFile
from rl_cluster_benchmark.execution.actor_learner.split import SECONDS, measure
from rl_cluster_benchmark.execution.actor_learner.unrolls import unroll_layout
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.machine.detection import detect
from rl_cluster_benchmark.machine.process import prepare_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the file lies; default: here")
    parser.add_argument("--size", type=int, default=2000, help="unrolls; default: 2000")
    parser.add_argument("--n-steps", type=int, default=128, help="steps of each; default: 128")
    args = parser.parse_args()
    prepare_process(1)
    config = Config.model_validate({"algorithm": "impala", "mode": "parallel", "training": {"n_steps": args.n_steps}})
    layout = unroll_layout(Task.of(config), args.n_steps)
    replay = ReplayFile(args.folder, args.size, layout)
    one = {name: torch.ones(1, *shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    start = time.perf_counter()
    for _ in range(args.size):
        replay.add(one, 0)
    keeping = (time.perf_counter() - start) / args.size
    generator, draws = np.random.default_rng(0), min(args.size, 1000)
    start = time.perf_counter()
    for _ in range(draws):
        replay.sample(1, generator)
    drawing = (time.perf_counter() - start) / draws
    cores = max(2, detect().usable_cores)
    learning = measure(config, cores, unrolls=8 * cores, seconds=SECONDS).learn * args.n_steps
    print(f"to keep an unroll {1e3 * keeping:.2f} ms, to draw one {1e3 * drawing:.2f} ms, to learn from it ", end="")
    print(f"{1e3 * learning:.0f} ms: replay adds {(keeping + drawing) / learning:.1%} at most")


if __name__ == "__main__":
    main()
