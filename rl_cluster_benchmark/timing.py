"""Where the time goes: every second of a run belongs to one phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("env", "inference", "update")  # whatever is left is "other"


class PhaseClock:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def shares(self, total: float) -> dict[str, float]:
        """Each phase's share of `total` seconds; "other" makes them add up to one."""
        shares = {name: seconds / total if total > 0 else 0.0 for name, seconds in self.seconds.items()}
        return shares | {"other": max(0.0, 1.0 - sum(shares.values()))}
