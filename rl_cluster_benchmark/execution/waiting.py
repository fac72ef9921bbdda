"""Waiting for another process: yield the core for a moment, then nap, longer and longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rl_cluster_benchmark.timing import PhaseClock

SPIN_SECONDS = 0.0002
FIRST_NAP, LONGEST_NAP = 0.00005, 0.001


def wait_until(ready: Callable[[], bool], clock: PhaseClock) -> None:
    if ready():
        return
    with clock.phase("waiting"):
        give_up_spinning = time.perf_counter() + SPIN_SECONDS
        nap = FIRST_NAP
        while not ready():
            if time.perf_counter() < give_up_spinning:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)
