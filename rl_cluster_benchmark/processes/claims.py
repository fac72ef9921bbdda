"""Numbers of pieces of work, of which each process takes the next one when it is ready.

They go through a pipe: the kernel gives each number to one reader only, and no process can die holding a lock. On every
CPU, the process that takes a number sees what its writer stored before, because the kernel locks the pipe for both.
"""

from __future__ import annotations

import multiprocessing.reduction
import os
import select
import struct
from collections.abc import Iterable
from typing import Any

NUMBER = struct.Struct("q")
MOST = select.PIPE_BUF // NUMBER.size  # numbers that fit into the smallest pipe, which a user with many pipes gets


class Claims:
    """A pool of numbers, each of which one process takes. Passed to a worker process, it is the same pool there."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def offer(self, numbers: Iterable[int]) -> None:
        """Add numbers; there may be at most MOST at a time.

        A page of a pipe has room again only when all of it has been read. If the pipe has only one page and that is
        full, the numbers that are left on it are read and written again together with the new ones.
        """
        message = b"".join(map(NUMBER.pack, numbers))
        written = 0
        while written < len(message):
            try:
                written += os.write(self._writing, message[written:])
            except BlockingIOError:
                left = b"".join(map(NUMBER.pack, iter(self.take, None)))
                if len(left) + len(message) - written > select.PIPE_BUF:
                    raise OSError(f"more than {MOST} numbers do not fit into a pipe") from None
                message, written = left + message[written:], 0

    def take(self) -> int | None:
        """Return the next number, or None if none is left."""
        try:
            return NUMBER.unpack(os.read(self.reading, NUMBER.size))[0]
        except BlockingIOError:
            return None

    def close(self) -> None:
        os.close(self.reading)
        os.close(self._writing)

    def __getstate__(self) -> dict[str, Any]:
        return {end: multiprocessing.reduction.DupFd(getattr(self, end)) for end in ("reading", "_writing")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reading, self._writing = state["reading"].detach(), state["_writing"].detach()
