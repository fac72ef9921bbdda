"""Waiting for another process: yield the core for a while, then nap, longer and longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rl_cluster_benchmark.timing import PhaseClock

SPIN_SECONDS, SPIN_SECONDS_ON_OWN_CORE = 0.0005, 0.25
FIRST_NAP, LONGEST_NAP = 0.00005, 0.001

_spin_seconds = SPIN_SECONDS


def keep_core() -> None:
    """This process is pinned to a core that is there for it alone: keep that busy through waits of the usual length.

    A core that sleeps again and again, for moments, is slower while it works, above all in a virtual machine.
    """
    global _spin_seconds
    _spin_seconds = SPIN_SECONDS_ON_OWN_CORE


def wait_until(ready: Callable[[], bool], clock: PhaseClock) -> None:
    if ready():
        return
    with clock.phase("waiting"):
        give_up_spinning = time.perf_counter() + _spin_seconds
        nap = FIRST_NAP
        while not ready():
            if time.perf_counter() < give_up_spinning:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)
