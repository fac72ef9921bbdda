"""Work that several processes share out among themselves: whoever is ready takes the next piece.

It is a pipe: the kernel hands each number to one reader only, and nobody can die holding a lock.
"""

from __future__ import annotations

import multiprocessing.reduction
import os
import struct
from collections.abc import Iterable
from typing import Any

NUMBER = struct.Struct("q")
MOST = 512  # numbers that fit into the smallest pipe that Linux makes, for a user who has many: one page


class Claims:
    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def offer(self, numbers: Iterable[int]) -> None:
        message = b"".join(map(NUMBER.pack, numbers))
        if os.write(self._writing, message) < len(message):
            raise OSError("a pipe holds less than this system's pipes should")

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
