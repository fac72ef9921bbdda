#!/usr/bin/env python3
"""Train A2C in one process: rlcb train --algorithm a2c --mode sequential."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "a2c", "--mode", "sequential", *sys.argv[1:]]))
