"""How a process learns that its run is profiled. Every worker of every run asks, so nothing heavy is imported here."""

from __future__ import annotations

import os

from rl_cluster_benchmark.profiling.stages import FOLDER_VARIABLE


def attach(rank: int) -> None:
    """Called by every process that computes; does nothing unless the run is profiled."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        from rl_cluster_benchmark.profiling.observer import observe

        observe(folder, rank)
