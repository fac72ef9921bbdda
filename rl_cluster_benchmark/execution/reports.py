"""What the parent process of a run hears from its workers, and what it tells them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run

TIME_IS_UP, INTERRUPTED = 1, 2  # orders to the workers; 0 is none


def reports(
    run: Run, pool: WorkerPool, shards: Sequence[Sequence[int]], order: torch.Tensor,
    when_ready: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """What the workers say, but for that they have started: time counts from when all have.

    A parent that was busy may hear of the first update before it hears that the last worker has started.
    """
    started, has_begun = 0, False
    for rank, (kind, content) in pool.messages(lambda: give_orders(run, order)):
        if kind == "started":
            print(f"Worker {rank} started with {len(shards[rank])} environments", flush=True)
            started += 1
        if not has_begun and (kind != "started" or started == len(shards)):
            has_begun = True
            run.start()
            when_ready()
        if kind != "started":
            yield kind, content


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


def give_orders(run: Run, order: torch.Tensor) -> None:
    """Tell the workers, through memory they all see, that the run is to end; before it has begun, it just ends."""
    run.check_begun()
    if due := order_of(run):
        order[0] = due


def order_of(run: Run) -> int:
    """Return what the workers of a run are to be told now: INTERRUPTED, TIME_IS_UP, or 0 to go on."""
    return INTERRUPTED if run.interrupted() else TIME_IS_UP if run.should_stop() else 0
