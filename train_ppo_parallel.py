#!/usr/bin/env python3
"""Train PPO on all cores: rlcb train --config ppo_parallel."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "ppo", "--mode", "parallel", "--default-config", "ppo_parallel"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
