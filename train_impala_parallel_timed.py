#!/usr/bin/env python3
"""Train IMPALA on all cores for --duration HOURS: rlcb train --config impala_parallel."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "impala", "--mode", "parallel", "--default-config", "impala_parallel"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
