"""What a run says while it goes on, on stdout and stderr: never a reason for it to wait, to fail or to lose its work.

A terminal is closed, `| head` has seen enough, nobody reads the pipe, Ctrl-S has stopped the screen, the disk of a log
is full: the run goes on, and what cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys

STDERR = 2
PATIENCE = 2.0  # seconds for a reader who is slow; one who has not read for so long is not waited for again


class Commentary(io.FileIO):
    """A stream that takes all that is written to it, and writes what somebody reads."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(_without_waiting(descriptor), "w", closefd=False)
        self._is_stuck = False

    def write(self, content) -> int:  # type: ignore[no-untyped-def]
        left = memoryview(content).cast("B")
        size = len(left)
        with contextlib.suppress(OSError):  # nobody can read it any more, or the disk is full
            while left and self._has_room():  # for so much, also where a longer write would wait for a reader
                with contextlib.suppress(BlockingIOError):  # there was less room than that
                    left = left[os.write(self.fileno(), left[: select.PIPE_BUF]) :]
        return size

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else 1000 * PATIENCE)
        return not self._is_stuck


def _without_waiting(descriptor: int) -> int:
    """The same pipe or terminal, opened again so that a write returns at once; other processes use the first, too."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
            way = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", way)
    return descriptor


_stderr: Commentary | None = None


def install() -> None:
    """From here on, what this process prints is commentary. What somebody has put in place of a stream stays."""
    global _stderr
    for descriptor, name in ((1, "stdout"), (STDERR, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        raw = Commentary(descriptor)
        buffered = io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffered, encoding=stream.encoding, errors="replace", line_buffering=True))
        if descriptor == STDERR:
            _stderr = raw


def stderr() -> int:
    """A descriptor for those who cannot print, a handler of signals or of crashes."""
    return STDERR if _stderr is None else _stderr.fileno()


def say(text: str) -> None:
    """On stderr, from anywhere: in the middle of a print(), in a thread, on the way out."""
    if _stderr is not None:
        _stderr.write(text.encode(errors="replace"))
    else:
        with contextlib.suppress(OSError):
            os.write(STDERR, text.encode(errors="replace"))
