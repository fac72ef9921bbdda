"""Measurement of how much memory a run's processes use."""

from __future__ import annotations

import contextlib
import time

import psutil

SECONDS_BETWEEN_READINGS = 10.0  # at least
SHARE_OF_TIME = 0.001  # the part of the time that readings may take, after the first ones
FIRST_READINGS = 3  # made without regard to that, so that one of them sees all processes at work


class MemoryReadings:
    """Reads the memory of this process and its workers, seldom, because a reading slows down the training.

    The kernel walks over all pages of every process, which takes tens of milliseconds for each. That takes a core from
    a worker, for which all others wait.
    """

    def __init__(self) -> None:
        self.next_at = 0.0
        self._count = 0

    def is_due(self) -> bool:
        return time.perf_counter() >= self.next_at

    def read(self) -> dict[int, int]:
        """Return the proportional set size of each process, in bytes by process id; schedule the next reading.

        This size counts shared memory in equal parts for the processes that share it, so their sum counts it once.
        """
        began = time.perf_counter()
        parent = psutil.Process()
        sizes = {}
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                sizes[process.pid] = process.memory_full_info().pss
        now = time.perf_counter()
        self._count += 1
        pause = (now - began) / SHARE_OF_TIME if self._count >= FIRST_READINGS else 0.0
        self.next_at = now + max(SECONDS_BETWEEN_READINGS, pause)
        return sizes
