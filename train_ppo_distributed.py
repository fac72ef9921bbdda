#!/usr/bin/env python3
"""Train PPO on several machines: rlcb train --config ppo_cpu_cluster."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "ppo", "--mode", "distributed", "--default-config", "ppo_cpu_cluster"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
