"""What `rlcb profile` and the processes of its run both know, and how a process learns that it is profiled.

Imports nothing: every worker of every run asks.
"""

from __future__ import annotations

import os

FOLDER_VARIABLE = "RLCB_PROFILE"  # where they leave notes for each other
STAGE_FILE, TRACED_FILE = "stage", "traced"
MEASURE, MEASURED, TRACE, DONE = 1, 2, 3, 4  # stages: the size of the stage file
INFERENCE, FORWARD, BACKWARD = "inference", "forward", "backward"  # passes; FORWARD is that of training
USAGE = {"minor_faults": "ru_minflt", "major_faults": "ru_majflt", "waits": "ru_nvcsw", "preemptions": "ru_nivcsw"}


def attach(rank: int) -> None:
    """Called by every process that computes; does nothing unless the run is profiled."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        from rl_cluster_benchmark.profile_run.observer import observe

        observe(folder, rank)
