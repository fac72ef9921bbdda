"""What the parent process of a run hears from its workers."""

from __future__ import annotations

from typing import Any

from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run


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
