#!/usr/bin/env python3
"""Train IMPALA in one process for --duration HOURS: rlcb train --config impala_sequential."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "impala", "--mode", "sequential", "--default-config", "impala_sequential"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
