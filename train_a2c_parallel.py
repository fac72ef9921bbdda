#!/usr/bin/env python3
"""Train A2C on all cores: rlcb train --algorithm a2c --mode parallel."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "a2c", "--mode", "parallel", *sys.argv[1:]]))
