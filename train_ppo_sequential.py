#!/usr/bin/env python3
"""Train PPO in one process: rlcb train --config ppo_sequential."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "ppo", "--mode", "sequential", "--default-config", "ppo_sequential"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
