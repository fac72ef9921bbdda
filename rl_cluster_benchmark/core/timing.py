"""Phases, to one of which every second of a run belongs, and beats, which tell a watchdog that the process goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("env", "inference", "update", "communication", "waiting")  # time outside them is "other"

observer: Callable[[PhaseClock, float], None] | None = None  # called at each change of phase in a profiled process


def _nobody(is_waiting: bool) -> None:
    pass


_told: Callable[[bool], None] = _nobody


def on_beat(tell: Callable[[bool], None] | None) -> None:
    """Set what is called whenever this process makes progress, with whether it now only waits; None for nothing."""
    global _told
    _told = tell or _nobody


def beat(is_waiting: bool = False) -> None:
    """Tell the watchdog, if there is one, that this process makes progress."""
    _told(is_waiting)


class PhaseClock:
    """A clock that adds up the seconds of each phase; the time of a nested phase is not counted for the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._current: str | None = None
        self._since = 0.0

    @contextmanager
    def phase(self, name: str, *, for_others: bool = False) -> Iterator[None]:
        """Count the time within the context as this phase; `for_others` says that it is spent waiting for others."""
        outer = self._switch(name, for_others)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str | None, for_others: bool = False) -> str | None:
        now = time.perf_counter()
        outer = self._current
        if outer is not None:
            self.seconds[outer] += now - self._since
        self._current, self._since = name, now
        _told(for_others or name == "waiting")
        if observer is not None:
            observer(self, now)
        return outer

    def shares(self, total: float) -> dict[str, float]:
        """Return each phase's share of `total` seconds, with the rest as "other", so that they add up to one."""
        total = max(total, sum(self.seconds.values()), 1e-9)  # workers' clocks may run a moment ahead of the parent's
        shares = {name: seconds / total for name, seconds in self.seconds.items()}
        return shares | {"other": 1.0 - sum(shares.values())}
