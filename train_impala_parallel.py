#!/usr/bin/env python3
"""Train IMPALA on all cores: rlcb train --algorithm impala --mode parallel."""

import sys

from rl_cluster_benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", "--algorithm", "impala", "--mode", "parallel", *sys.argv[1:]]))
