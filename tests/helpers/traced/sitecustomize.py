"""Records which modules of the package an observation passes in training, in every process of a run.

Python imports this by itself in each process whose PYTHONPATH names this folder; RLCB_TRACE names the folder for what
is found. A module is passed if one of its functions is given or returns numbers that come from the environment, or is
a method of something that holds them, between the environment's first step and the first checkpoint.
"""

import mmap
import os
import sys
from pathlib import Path

PACKAGE = "/rl_cluster_benchmark/"
STEP, SAVED = ("env/environments.py", "step"), ("run/run.py", "save")
OPTIMISER = "Adam.step"
BEFORE, DURING, AFTER = range(3)  # the first byte of what all processes see
LOSSES = {"policy_loss", "losses/policy_loss"}  # names in the metrics of an update


def place_of(code):
    return code.co_filename.rpartition(PACKAGE)[2], code.co_name


def holds_numbers(value, depth=2):
    """Return whether this is an array, a checkpoint's bytes, metrics by name, or a record or a list of such."""
    if isinstance(value, dict):
        return bool(LOSSES & value.keys()) or (depth > 0 and any(holds_numbers(v, depth - 1) for v in value.values()))
    if isinstance(value, bytes):
        return value.startswith(b"PK")
    if isinstance(value, list | tuple):
        return depth > 0 and any(holds_numbers(v, depth - 1) for v in value)
    if type(value).__name__ in ("Tensor", "ndarray"):
        return value.ndim > 0
    return depth > 0 and hasattr(value, "__dict__") and any(holds_numbers(v, 0) for v in vars(value).values())


def begin(folder):
    with open(folder / "stage", "r+b") as file:
        stage = mmap.mmap(file.fileno(), 1)
    seen = set()

    def note(what):
        seen.add(what)
        with open(folder / f"{os.getpid()}.seen", "a") as out:
            out.write(what + "\n")

    def profile(frame, event, returned):
        code = frame.f_code
        if stage[0] == AFTER or event not in ("call", "return") or PACKAGE not in code.co_filename:
            return
        place = place_of(code)
        if event == "return" and place == STEP:
            stage[0] = DURING
        if stage[0] == BEFORE:
            return
        line = f"module {place[0]}"
        if line not in seen:
            values = (
                [returned]
                if event == "return"
                else [frame.f_locals.get(n) for n in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
            )
            if any(map(holds_numbers, values)):
                note(line)
                note(f"why {place[0]} {place[1]}")
        if event == "return" and place == SAVED:
            stage[0] = AFTER
        if event == "call" and code.co_qualname == OPTIMISER:
            calls = []
            while frame is not None:
                if PACKAGE in frame.f_code.co_filename:
                    calls.append(":".join(place_of(frame.f_code)))
                frame = frame.f_back
            line = "calls " + " ".join(reversed(calls))
            if line not in seen:
                note(line)

    sys.setprofile(profile)


if "RLCB_TRACE" in os.environ:
    begin(Path(os.environ["RLCB_TRACE"]))
