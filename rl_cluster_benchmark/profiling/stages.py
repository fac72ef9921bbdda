"""What `rlcb profile` and the processes of the run that it starts both know. It imports nothing."""

from __future__ import annotations

FOLDER_VARIABLE = "RLCB_PROFILE"  # where they leave notes for each other
STAGE_FILE, TRACED_FILE = "stage", "traced"
MEASURE, MEASURED, TRACE, DONE = 1, 2, 3, 4  # stages: the size of the stage file
INFERENCE, FORWARD, BACKWARD = "inference", "forward", "backward"  # passes; FORWARD is that of training
USAGE = {"minor_faults": "ru_minflt", "major_faults": "ru_majflt", "waits": "ru_nvcsw", "preemptions": "ru_nivcsw"}
