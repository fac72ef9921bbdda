"""Child processes of a benchmark: one at a time, each ends in good order when the benchmark does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_cluster_benchmark.run.stop import Signals

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_SAVE, SECONDS_TO_DIE = 300.0, 10.0  # from SIGTERM to SIGKILL, and from that to the end


def run_child(
    arguments: Sequence[str], log: Path, signals: Signals, look: Callable[[], None], deadline: float | None = None
) -> int:
    """Run `rlcb ARGUMENTS`, its output appended to the log; returns its status, 124 when it ran into the deadline.

    A signal is passed on once: the child saves and ends. It has a session of its own, so that Ctrl-C reaches it
    through us only; and when we are killed, the kernel asks it to end.
    """
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    with open(log, "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "rl_cluster_benchmark", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    started, late = time.monotonic(), False
    asked: float | None = None
    try:
        while child.poll() is None:
            late = late or (deadline is not None and time.monotonic() - started > deadline)
            if (signals.received is not None or late) and asked is None:
                child.send_signal(signal.SIGTERM)
                asked = time.monotonic()
            if asked is not None and time.monotonic() - asked > SECONDS_TO_SAVE:
                break
            look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        if child.poll() is None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it
                child.wait(SECONDS_TO_DIE)
    return 124 if late else -signal.SIGKILL if child.returncode is None else child.returncode


def reason_in(log: Path, status: int) -> str:
    """Why a child failed: the sentence it ended with."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")[-20_000:]
    except OSError:
        text = ""
    sentences = re.findall(r"^error: (.+)$", text, flags=re.MULTILINE)
    if sentences:
        return sentences[-1]
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it ended with status {status}; see {log}"
