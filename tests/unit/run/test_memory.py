"""How often a run looks at its memory."""

import os
import time

import psutil

from rl_cluster_benchmark.run.memory import SHARE_OF_TIME, MemoryReadings


def test_the_longer_a_reading_takes_the_longer_it_is_to_the_next(monkeypatch):
    readings = MemoryReadings()
    assert readings.is_due()
    sizes = readings.read()
    assert sizes[os.getpid()] > 10_000_000
    assert not readings.is_due()
    usual = psutil.Process.memory_full_info

    def slow(process):
        time.sleep(0.03)
        return usual(process)

    monkeypatch.setattr(psutil.Process, "memory_full_info", slow)
    readings.read()
    assert 9 < readings.next_at - time.perf_counter() <= 10, "the first few come soon: some processes start late"
    readings.read()
    assert readings.next_at - time.perf_counter() > 0.03 / SHARE_OF_TIME - 1
