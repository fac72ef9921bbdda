#!/usr/bin/env python3
"""Draw the curves of a run: rlcb plot."""

import sys

from rl_cluster_benchmark.cli import main

sys.exit(main(["plot", *sys.argv[1:]]))
