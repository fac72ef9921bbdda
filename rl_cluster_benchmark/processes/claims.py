"""Work that several processes share out among themselves: whoever is ready takes the next piece.

It is a pipe: the kernel hands each number to one reader only, and nobody can die holding a lock. What its writer stored
before, whoever takes a number sees, on any CPU: the kernel locks the pipe for both.
"""

from __future__ import annotations

import multiprocessing.reduction
import os
import select
import struct
from collections.abc import Iterable
from typing import Any

NUMBER = struct.Struct("q")
MOST = select.PIPE_BUF // NUMBER.size  # numbers that any pipe holds: Linux makes the smallest, for a user who has many


class Claims:
    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def offer(self, numbers: Iterable[int]) -> None:
        """Add numbers, of which there may be MOST at a time.

        A page of a pipe has room again only when all of it has been read. Where it is the only one, whatever is left on
        it is read, and written together with what is new.
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
        """None when there is nothing left."""
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
