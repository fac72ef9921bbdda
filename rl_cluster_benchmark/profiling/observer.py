"""The observer in each process of a profiled run: it records what the process does between two common moments.

`rlcb profile` moves all processes from stage to stage by appending a byte to a file that they look at whenever they
change phase: MEASURE (only clocks), MEASURED, TRACE (torch's profiler, in one process of each role), DONE.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.core import timing
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.profiling.pass_timers import Passes
from rl_cluster_benchmark.profiling.stages import DONE, MEASURE, MEASURED, STAGE_FILE, TRACE, TRACED_FILE, USAGE

SECONDS_BETWEEN_LOOKS = 0.01
OPERATORS = 200  # rows of the profiler's table that are kept


def observe(folder: str, rank: int) -> None:
    """Observe this process from now on; results go to the folder."""
    timing.observer = Observer(Path(folder), rank)


class Observer:
    """Called at each change of phase (core/timing.py); follows the stages and writes this process's measurements."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._stage, self._looked = 0, 0.0
        self._profiler: Any = None
        self._result: dict[str, Any] = {"rank": rank, "pid": os.getpid()}
        self._passes = Passes()
        self._passes.install()
        (folder / f"{rank}.pid").write_text(str(os.getpid()))

    def __call__(self, clock: PhaseClock, now: float) -> None:
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        stage = os.stat(self.folder / STAGE_FILE).st_size
        while self._stage < stage:
            self._stage += 1
            self._enter(self._stage, clock)

    def _enter(self, stage: int, clock: PhaseClock) -> None:
        if stage == MEASURE:
            self._before = self._now(clock)
        elif stage == MEASURED:
            self._result |= {"before": self._before, "after": self._now(clock)}
            (self.folder / f"{self.rank}.measured").touch()
        elif stage == TRACE:  # after measuring: starting torch's profiler takes seconds, in which others wait
            if str(self.rank) in (self.folder / TRACED_FILE).read_text().split():
                self._start_profiler()
        elif stage == DONE:
            if self._profiler is not None:
                self._stop_profiler()
            self._write()

    def _now(self, clock: PhaseClock) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "time": time.perf_counter(),
            "cpu": time.process_time(),
            "phases": dict(clock.seconds),
            "passes": self._passes.state(),
            **{name: getattr(usage, field) for name, field in USAGE.items()},
        }

    def _start_profiler(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        self._profiler.start()
        self._trace_started = time.perf_counter()
        self._passes.recording = True
        (self.folder / f"{self.rank}.tracing").touch()

    def _stop_profiler(self) -> None:
        self._passes.recording = False
        seconds = time.perf_counter() - self._trace_started
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.folder / f"{self.rank}.trace.json"))
        rows = [
            {"name": row.key, "seconds": row.self_cpu_time_total / 1e6, "calls": row.count}
            for row in self._profiler.key_averages()
        ]
        rows.sort(key=lambda row: -row["seconds"])
        self._result |= {"traced_seconds": seconds, "operators": rows[:OPERATORS]}
        self._profiler = None

    def _write(self) -> None:
        temporary = self.folder / f".{self.rank}.json"
        temporary.write_text(json.dumps(self._result))
        temporary.rename(self.folder / f"{self.rank}.json")
