"""Programs that run as child processes: how they start, are told to end and are killed, and why one of them failed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.core.stop import die_with_parent

SECONDS_TO_SAVE, SECONDS_TO_DIE = 300.0, 10.0  # from SIGTERM to SIGKILL, and from that to the end
READ_OF_A_LOG = 20_000  # characters at its end


def rlcb(*arguments: object) -> list[str]:
    """Return the call of this program with these arguments."""
    return [sys.executable, "-m", "rl_cluster_benchmark", *map(str, arguments)]


class ChildProcess:
    """A program in a session of its own, so that Ctrl-C reaches it through this process only.

    Its output is appended to a file; where none is named, its input and its output are pipes.
    """

    def __init__(
        self, call: Sequence[str], *, output: Path | None = None, cores: Collection[int] | None = None,
        at_our_end: int = signal.SIGTERM, told: Collection[int] = (signal.SIGTERM,), **options: Any,
    ) -> None:  # fmt: skip
        """Start it, on these cores if any are named.

        The kernel sends it `at_our_end` when this process ends, however it does. It obeys the signals in `told` even if
        this process ignores them. `options` are for subprocess.Popen.
        """
        die = die_with_parent(at_our_end, told=told)
        self.output_begins = 0  # the size that the file had before

        def settle() -> None:
            die()
            if cores is not None:
                os.sched_setaffinity(0, cores)

        how: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True, "preexec_fn": settle} | options
        self.process: subprocess.Popen[Any]
        if output is None:
            self.process = subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how)
        else:
            with output.open("ab") as file:
                self.output_begins = os.fstat(file.fileno()).st_size
                self.process = subprocess.Popen(call, stdin=subprocess.DEVNULL, stdout=file, **how)
        self.started = time.monotonic()
        self._told_at: float | None = None
        self._was_killed = False

    def poll(self) -> int | None:
        """Return its exit status, 128 + N if signal N has ended it; None while it runs."""
        status = self.process.poll()
        return status if status is None or status >= 0 else 128 - status

    @property
    def status(self) -> int:
        """Return the exit status of a process that has ended, -N if signal N has ended it."""
        return -signal.SIGKILL if self.process.returncode is None else self.process.returncode

    def send(self, number: int) -> None:
        """Send a signal to the program."""
        self.process.send_signal(number)  # which does nothing once it has ended

    def send_to_all(self, number: int) -> None:
        """Send a signal to the program and to all that it has started in its session."""
        with contextlib.suppress(ProcessLookupError):  # they have ended
            os.killpg(self.process.pid, number)

    def ask_to_end(self) -> None:
        """Tell it to save and end; it is told once."""
        if self._told_at is None:
            self.send(signal.SIGTERM)
            self._told_at = time.monotonic()

    def has_ended(self) -> bool:
        """Return whether it has ended; one that was asked to long ago is killed."""
        if self._told_at is not None and time.monotonic() - self._told_at > SECONDS_TO_SAVE:
            self.kill()
        return self.process.poll() is not None or self._was_killed

    def kill(self) -> None:
        """Kill it and all that it has started, if it has not ended."""
        if self.process.poll() is None and not self._was_killed:
            self.send_to_all(signal.SIGKILL)
            self._was_killed = True
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it
                self.process.wait(SECONDS_TO_DIE)

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def error_in(output: Path, begins: int = 0) -> str | None:
    """Return the sentences of the error that a run of this program ended with; None if there are none in its output.

    `begins` is the byte of the file with which its output begins, behind that of earlier runs.
    """
    try:
        text = output.read_bytes()[begins:].decode(errors="replace")[-READ_OF_A_LOG:]
    except OSError:
        return None
    found = re.split(r"^error: ", text, flags=re.MULTILINE)
    return found[-1].strip() if len(found) > 1 else None


def how_it_ended(status: int | None) -> str:
    """Return `was killed by SIGKILL`, `ended with status 1`."""
    if status is not None and status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def reason_of_failure(output: Path, status: int, begins: int = 0) -> str:
    """Return in one line why a run of this program has failed, from its output or else from its exit status."""
    sentences = error_in(output, begins)
    if sentences:
        return sentences.splitlines()[0]
    return f"it {how_it_ended(status)}" + (f"; see {output}" if status >= 0 else "")
