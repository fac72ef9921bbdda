"""Child processes of a benchmark or a search: each ends in good order when its parent does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rl_cluster_benchmark.core.stop import Signals, die_with_parent

SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_SAVE, SECONDS_TO_DIE = 300.0, 10.0  # from SIGTERM to SIGKILL, and from that to the end


class Child:
    """`rlcb ARGUMENTS` in a process of its own, on these cores if any are named, its output appended to the log.

    It has a session of its own, so that Ctrl-C reaches it through us only; and when we are killed, the kernel asks it
    to end.
    """

    def __init__(self, arguments: Sequence[str], log: Path, cores: Collection[int] | None = None) -> None:
        die = die_with_parent(signal.SIGTERM)

        def settle() -> None:
            die()
            if cores is not None:
                os.sched_setaffinity(0, cores)

        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl_cluster_benchmark", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=settle,
            )
        self.started = time.monotonic()
        self._asked: float | None = None
        self._was_killed = False

    def ask_to_end(self) -> None:
        """Tell it to save and end; it is told once."""
        if self._asked is None:
            self._process.send_signal(signal.SIGTERM)
            self._asked = time.monotonic()

    def has_ended(self) -> bool:
        """Return whether it has ended; one that was asked to long ago is killed."""
        if self._asked is not None and time.monotonic() - self._asked > SECONDS_TO_SAVE:
            self.kill()
        return self._process.poll() is not None or self._was_killed

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self._process.poll() is None and not self._was_killed:
            self._process.kill()
            self._was_killed = True
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it
                self._process.wait(SECONDS_TO_DIE)

    @property
    def status(self) -> int:
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode


def run_child(
    arguments: Sequence[str], log: Path, signals: Signals, look: Callable[[], None], deadline: float | None = None
) -> int:
    """Run `rlcb ARGUMENTS` and pass a signal on; returns its status, 124 when it ran into the deadline."""
    child, late = Child(arguments, log), False
    try:
        while not child.has_ended():
            late = late or (deadline is not None and time.monotonic() - child.started > deadline)
            if signals.received is not None or late:
                child.ask_to_end()
            look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        child.kill()
    return 124 if late else child.status


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
