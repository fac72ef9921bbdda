"""Names that `rlcb profile` and the processes of the run that it starts share. This module imports nothing."""

from __future__ import annotations

FOLDER_VARIABLE = "RLCB_PROFILE"  # names the folder in which they exchange files
STAGE_FILE, TRACED_FILE = "stage", "traced"
MEASURE, MEASURED, TRACE, DONE = 1, 2, 3, 4  # stages; the stage file's size in bytes is the current one
INFERENCE, FORWARD, BACKWARD = "inference", "forward", "backward"  # kinds of passes; FORWARD is a training pass's
USAGE = {"minor_faults": "ru_minflt", "major_faults": "ru_majflt", "waits": "ru_nvcsw", "preemptions": "ru_nivcsw"}
