"""Output to stdout and stderr that can neither block nor fail a run.

If the terminal is closed, `| head` has ended, nobody reads the pipe, Ctrl-S has stopped the screen or the disk is full,
the run goes on and the text that cannot be written is dropped.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys

STDERR = 2
PATIENCE = 2.0  # seconds to wait for a slow reader; after that, writes do not wait until it reads again


class Commentary(io.FileIO):
    """A stream that accepts everything, writes what the reader takes, and drops the rest."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(_without_waiting(descriptor), "w", closefd=False)
        self._is_stuck = False

    def write(self, content) -> int:  # type: ignore[no-untyped-def]
        left = memoryview(content).cast("B")
        size = len(left)
        with contextlib.suppress(OSError):  # nobody can read it any more, or the disk is full
            while left and self._has_room():  # PIPE_BUF bytes at a time: a longer write could wait for the reader
                with contextlib.suppress(BlockingIOError):  # there was less room than PIPE_BUF
                    left = left[os.write(self.fileno(), left[: select.PIPE_BUF]) :]
        return size

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else 1000 * PATIENCE)
        return not self._is_stuck


def _without_waiting(descriptor: int) -> int:
    """Return a descriptor whose writes do not block: for a pipe or terminal, the same file opened with O_NONBLOCK.

    The flag is not set on the given descriptor itself, because other processes share it.
    """
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor):
            way = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{descriptor}", way)
    return descriptor


_stderr: Commentary | None = None


def install() -> None:
    """Replace sys.stdout and sys.stderr by streams that never block; leave a stream that somebody has replaced."""
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
    """Return a descriptor of stderr, for code that cannot call print(), such as faulthandler."""
    return STDERR if _stderr is None else _stderr.fileno()


def say(text: str) -> None:
    """Write to stderr without Python's buffers: safe in a signal handler, in a thread and while Python exits."""
    if _stderr is not None:
        _stderr.write(text.encode(errors="replace"))
    else:
        with contextlib.suppress(OSError):
            os.write(STDERR, text.encode(errors="replace"))
