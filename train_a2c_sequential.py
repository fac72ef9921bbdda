#!/usr/bin/env python3
"""Train A2C in one process: rlcb train --config a2c_sequential."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "a2c", "--mode", "sequential", "--default-config", "a2c_sequential"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
