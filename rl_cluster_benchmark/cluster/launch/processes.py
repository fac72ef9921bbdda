"""A node's process as the launcher sees it: it prints, it ends, it can be told to stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

PR_SET_PDEATHSIG = 1
SECONDS_TO_DIE = 10.0

Lines = queue.SimpleQueue[tuple[str, str]]
"""(node, what it printed)."""


def die_with_parent(number: int) -> Callable[[], None]:
    """To be called in a new process: the kernel sends it this signal when its parent has ended, however it did."""
    prctl = ctypes.CDLL(None).prctl  # found before the fork: after it, little is safe to do
    return lambda: prctl(PR_SET_PDEATHSIG, number)


class NodeProcess(Protocol):
    name: str

    def poll(self) -> int | None:
        """Its exit status once it has ended."""
        ...

    def stop(self, number: int) -> None:
        """Ask it to end in good order."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None:
        """It has ended: wait for the rest of its output."""
        ...


class LocalProcess:
    """A child process with its output on a queue. It has a session of its own: Ctrl-C reaches the launcher alone."""

    def __init__(self, name: str, call: Sequence[str], lines: Lines, environ: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            call,
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), name=f"rlcb-output-{name}", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def stop(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # killed, but held by a disk that does not answer
            self._process.wait(SECONDS_TO_DIE)
        self._reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self, lines: Lines) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                lines.put((self.name, line.decode(errors="replace").rstrip()))


class SshProcess(LocalProcess):
    """A process on another machine, at the other end of `ssh -tt`: the terminal there dies with the connection."""

    def stop(self, number: int) -> None:
        """Ctrl-C, typed at that terminal: its output still reaches us while it ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"\x03")
            self._process.stdin.flush()
