"""Waiting for another process: yield the core for a while, then nap, longer and longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rl_cluster_benchmark.core.timing import PhaseClock

SPIN_SECONDS, SPIN_SECONDS_ON_OWN_CORE = 0.0005, 0.25
SHORTEST_NAP, LONGEST_NAP, SHARE_OF_NAP = 0.00005, 0.001, 0.05  # the last of what was waited so far

_spin_seconds = SPIN_SECONDS


def keep_core() -> None:
    """This process is pinned to a core that is there for it alone: keep that busy through waits of the usual length.

    A core that sleeps again and again, for moments, is slower while it works, above all in a virtual machine. It is for
    workers in step, whose waits are short; an actor may wait most of its time, and leaves its core to others meanwhile.
    """
    global _spin_seconds
    _spin_seconds = SPIN_SECONDS_ON_OWN_CORE


def wait_until(ready: Callable[[], bool], clock: PhaseClock) -> None:
    if ready():
        return
    with clock.phase("waiting"):
        began = time.perf_counter()
        while not ready():
            waited = time.perf_counter() - began
            if waited < _spin_seconds:
                os.sched_yield()
            else:
                time.sleep(min(max(SHORTEST_NAP, SHARE_OF_NAP * waited), LONGEST_NAP))
