"""Start of the measurements in a profiled run. Every process of every run imports this, so it imports nothing heavy."""

from __future__ import annotations

import os

from rl_cluster_benchmark.profiling.stages import FOLDER_VARIABLE


def attach(rank: int) -> None:
    """Start to measure this process if its run is profiled; called by every process that computes."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        from rl_cluster_benchmark.profiling.observer import observe

        observe(folder, rank)
