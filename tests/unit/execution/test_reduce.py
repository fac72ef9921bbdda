"""Sums over the workers of a machine: what the time in them counts as."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from rl_cluster_benchmark.core import timing
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.processes.waiting import wait_until

WORKERS, NETWORK = 3, 0.3  # seconds that the network takes


def slow(total):
    """Stand in for what the first worker does on the network."""
    time.sleep(NETWORK)


def phases(call: Callable[[SharedMemoryReducer], object]) -> list[dict[str, float]]:
    """Return the seconds in each phase of workers that all make this call."""
    memory = SharedMemoryReducer.allocate(WORKERS, vector_size=4, small_size=4)
    clocks = [PhaseClock() for _ in range(WORKERS)]
    workers = [
        threading.Thread(target=call, args=(SharedMemoryReducer(memory, rank, clock, slow),), daemon=True)
        for rank, clock in enumerate(clocks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    return [clock.seconds for clock in clocks]


@pytest.mark.parametrize(
    "call", [lambda reduce: reduce(torch.ones(4)), lambda reduce: reduce.share(torch.ones(4), slow)]
)
def test_the_network_is_communication_for_all_workers_of_a_machine(call):
    """Nobody waits for a slow worker while the first one talks to other machines."""
    for seconds in phases(call):
        assert seconds["communication"] > 0.8 * NETWORK
        assert seconds["waiting"] < 0.5 * NETWORK


def test_a_slow_worker_is_waited_for():
    def call(reduce):
        if reduce.rank == WORKERS - 1:
            time.sleep(NETWORK)
        reduce.beyond = None
        reduce(torch.ones(4))

    *others, _ = phases(call)
    for seconds in others:
        assert seconds["waiting"] > 0.8 * NETWORK
        assert seconds["communication"] < 0.5 * NETWORK


def test_who_waits_is_not_to_blame_whatever_the_time_counts_as():
    said: list[bool] = []
    timing.on_beat(said.append)
    try:
        wait_until(lambda: bool(said), PhaseClock(), "communication")
    finally:
        timing.on_beat(None)
    assert said == [True, False]
