#!/usr/bin/env python3
"""Draw the curves of a run: rlcb plot."""

import sys

from rl_cluster_benchmark.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plot", *sys.argv[1:]]))
