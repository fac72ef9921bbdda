"""Where the time goes: every second of a run belongs to one phase. And that it goes on: whoever watches is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("env", "inference", "update", "communication", "waiting")  # whatever is left is "other"

observer: Callable[[PhaseClock, float], None] | None = None  # of a profiled process: called when a phase begins or ends


def _nobody(is_waiting: bool) -> None:
    pass


_told: Callable[[bool], None] = _nobody


def on_beat(tell: Callable[[bool], None] | None) -> None:
    """`tell` is called whenever this process gets on, with whether all it does now is wait; None ends that."""
    global _told
    _told = tell or _nobody


def beat(is_waiting: bool = False) -> None:
    _told(is_waiting)


class PhaseClock:
    """Phases may nest; the time of an inner one is not counted for the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._current: str | None = None
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str | None) -> str | None:
        now = time.perf_counter()
        outer = self._current
        if outer is not None:
            self.seconds[outer] += now - self._since
        self._current, self._since = name, now
        _told(name == "waiting")
        if observer is not None:
            observer(self, now)
        return outer

    def shares(self, total: float) -> dict[str, float]:
        """Each phase's share of `total` seconds; "other" makes them add up to one."""
        total = max(total, sum(self.seconds.values()), 1e-9)  # workers' clocks may run a moment ahead of the parent's
        shares = {name: seconds / total for name, seconds in self.seconds.items()}
        return shares | {"other": 1.0 - sum(shares.values())}
