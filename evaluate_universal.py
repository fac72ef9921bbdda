#!/usr/bin/env python3
"""Evaluate a trained agent of any algorithm: rlcb evaluate."""

import sys

from rl_cluster_benchmark.cli import main

sys.exit(main(["evaluate", *sys.argv[1:]]))
