"""The table of where the processes of a run spend their time: each writes its own row, every process may read all."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rl_cluster_benchmark.core.timing import PHASES, PhaseClock
from rl_cluster_benchmark.processes.shared_memory import MemoryLayout


def layout(num_processes: int) -> MemoryLayout:
    """Return the table's layout: a row per process of the seconds in each phase, in all, and of CPU time."""
    return {"times": ((num_processes, len(PHASES) + 2), torch.float64)}


class TimeKeeper:
    """Writes one process's row of the table. A process that replaces one that died continues that one's row."""

    def __init__(self, row: Tensor, clock: PhaseClock) -> None:
        self.row, self.clock = row, clock
        self._before = row.clone()
        self.start()

    def start(self) -> None:
        """Start to count time now."""
        self.clock.seconds = dict.fromkeys(PHASES, 0.0)
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def write(self) -> None:
        here = [*self.clock.seconds.values(), self.elapsed, time.process_time() - self._cpu_started]
        self.row.copy_(self._before + torch.tensor(here, dtype=torch.float64))


def mean_phases(table: Tensor, before: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase: `before`, from before a resume, plus the mean over these processes."""
    means = table[:, : len(PHASES)].mean(0).tolist()
    return {name: before[name] + seconds for name, seconds in zip(PHASES, means, strict=True)}


def cpu_seconds(table: Tensor) -> float:
    return float(table[:, -1].sum())


def waits(table: Tensor) -> list[float]:
    """Return how many seconds these processes have waited and how many they have run, in all."""
    return [float(table[:, PHASES.index("waiting")].sum()), float(table[:, -2].sum())]
