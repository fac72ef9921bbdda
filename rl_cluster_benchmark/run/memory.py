"""How much memory a run's processes use."""

from __future__ import annotations

import contextlib
import time

import psutil

SECONDS_BETWEEN_READINGS = 10.0  # at least
SHARE_OF_TIME = 0.001  # that readings may take, after
FIRST_READINGS = 3  # of which one sees all processes at work


class MemoryReadings:
    """Of this process and its workers, made seldom: each takes a core from a worker, and all wait for that worker.

    The kernel walks over all pages of every process, which takes it tens of milliseconds for each.
    """

    def __init__(self) -> None:
        self.next_at = 0.0
        self._count = 0

    def is_due(self) -> bool:
        return time.perf_counter() >= self.next_at

    def read(self) -> dict[int, int]:
        """By process, the proportional set size, which counts shared memory once over all of them."""
        began = time.perf_counter()
        parent = psutil.Process()
        sizes = {}
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # one that has just ended
                sizes[process.pid] = process.memory_full_info().pss
        now = time.perf_counter()
        self._count += 1
        pause = (now - began) / SHARE_OF_TIME if self._count >= FIRST_READINGS else 0.0
        self.next_at = now + max(SECONDS_BETWEEN_READINGS, pause)
        return sizes
