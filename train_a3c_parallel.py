#!/usr/bin/env python3
"""Train A3C on all cores: rlcb train --algorithm a3c --mode parallel."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "a3c", "--mode", "parallel", *sys.argv[1:]]))
