"""What the parent process of a run hears from its workers, and what it tells them."""

from __future__ import annotations

from typing import Any

from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run

TIME_IS_UP, INTERRUPTED = 1, 2  # orders to the workers; 0 is none


def write_down(run: Run, kind: str, content: Any) -> None:
    """What a worker reports."""
    if kind == "record":
        run.clock.seconds = content.pop("phase_seconds")
        run.worker_cpu_seconds = content.pop("cpu_seconds")
        run.record(**content)
    elif kind == "save":
        run.save(checkpoint.unpack(content))
    elif kind == "final state":
        run.finish(checkpoint.unpack(content))


def order_of(run: Run) -> int:
    """Return what the workers of a run are to be told now: INTERRUPTED, TIME_IS_UP, or 0 to go on."""
    return INTERRUPTED if run.interrupted() else TIME_IS_UP if run.should_stop() else 0
