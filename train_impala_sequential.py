#!/usr/bin/env python3
"""Train IMPALA in one process: rlcb train --algorithm impala --mode sequential."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "impala", "--mode", "sequential", *sys.argv[1:]]))
