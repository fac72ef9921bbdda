#!/usr/bin/env python3
"""Train PPO on all cores: rlcb train --algorithm ppo --mode parallel."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "ppo", "--mode", "parallel", *sys.argv[1:]]))
