#!/usr/bin/env python3
"""Compare runs: rlcb compare."""

import sys

from rl_cluster_benchmark.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
