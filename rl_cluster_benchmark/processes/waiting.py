"""Waiting for another process: yield the core for a while, then sleep, longer and longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rl_cluster_benchmark.core.timing import PhaseClock

SPIN_SECONDS, SPIN_SECONDS_ON_OWN_CORE = 0.0005, 0.25
SHORTEST_NAP, LONGEST_NAP, SHARE_OF_NAP = 0.00005, 0.001, 0.05  # a sleep lasts this share of the wait so far

_spin_seconds = SPIN_SECONDS


def keep_core() -> None:
    """Let this process, which has a core of its own, keep that core busy in waits of the usual length.

    A core that sleeps again and again for moments is slower while it works, above all in a virtual machine. Called by
    workers that take every step together, whose waits are short; not by IMPALA's actors, which may wait most of their
    time and leave their core to other processes meanwhile.
    """
    global _spin_seconds
    _spin_seconds = SPIN_SECONDS_ON_OWN_CORE


def wait_until(ready: Callable[[], bool], clock: PhaseClock, phase: str = "waiting") -> None:
    """Return as soon as `ready()` is true; the time counts as this phase."""
    if ready():
        return
    with clock.phase(phase, for_others=True):
        began = time.perf_counter()
        while not ready():
            waited = time.perf_counter() - began
            if waited < _spin_seconds:
                os.sched_yield()
            else:
                time.sleep(min(max(SHORTEST_NAP, SHARE_OF_NAP * waited), LONGEST_NAP))
