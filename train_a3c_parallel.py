#!/usr/bin/env python3
"""Train A3C on all cores: rlcb train --config a3c_parallel."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "a3c", "--mode", "parallel", "--default-config", "a3c_parallel"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
