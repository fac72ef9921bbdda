#!/usr/bin/env python3
"""Check the installation: rlcb doctor."""

import sys

from rl_cluster_benchmark.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
