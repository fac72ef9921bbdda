"""Metrics of asynchrony (policy lag, idle times and others), aggregated over a whole run."""

from __future__ import annotations

from typing import Any


class Asynchrony:
    """Aggregates metrics over the updates of a run.

    It keeps the maximum of metrics whose names end in `_max`; the last value of counts (`system/...`) and of shares of
    the time since the start (`..._idle`); and the mean of all others.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.waits: dict[str, list[float]] = {}  # role -> seconds waited and seconds lived, of all its processes

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            before = self._sums.get(name, 0.0)
            if name.endswith("_max"):
                self._sums[name], self._counts[name] = max(before, value), 1
            elif name.startswith("system/") or name.endswith("_idle"):
                self._sums[name], self._counts[name] = value, 1
            else:
                self._sums[name], self._counts[name] = before + value, self._counts.get(name, 0) + 1

    def summary(self) -> dict[str, float]:
        return {name.rpartition("/")[2]: total / self._counts[name] for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts), "waits": dict(self.waits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        self.waits = dict(state.get("waits", {}))
