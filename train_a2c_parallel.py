#!/usr/bin/env python3
"""Train A2C on all cores: rlcb train --config a2c_parallel."""

import sys

from rl_cluster_benchmark.cli.main import main

CALL = ["train", "--algorithm", "a2c", "--mode", "parallel", "--default-config", "a2c_parallel"]

if __name__ == "__main__":
    sys.exit(main([*CALL, *sys.argv[1:]]))
