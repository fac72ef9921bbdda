#!/usr/bin/env python3
"""Train PPO on several machines: rlcb train --algorithm ppo --mode distributed."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "ppo", "--mode", "distributed", *sys.argv[1:]]))
