#!/usr/bin/env python3
"""Evaluate a trained agent of any algorithm: rlcb evaluate."""

import sys

from rl_cluster_benchmark.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
