"""What this machine can do at best: multiplying matrices, and copying memory, on one core and on all at once.

A process for each core, as in training: the first measures alone, then all at the same time. Run as a program, this
file is one of them: it measures when it is told to by a line on its standard input, and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.processes.child_process import ChildProcess

PRECISIONS = ("float32", "bfloat16")
SIZES = (256, 512, 1024)  # of the matrices: which one is fastest depends on caches
SECONDS = 0.1  # for each figure; short calls, so that some are not disturbed
COPIED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Peak:
    """GFLOP/s by precision and GB/s, of one core and of all at once."""

    cores: int
    one_core: dict[str, float]
    all_cores: dict[str, float]

    def of(self, precision: str, threads: int, busy_cores: int) -> float:
        """Return the GFLOP/s that `threads` cores reach when `busy_cores` are busy in all."""
        if busy_cores > 1:
            return self.all_cores[precision] / self.cores * threads
        return self.one_core[precision] * threads


def measure(cores: Sequence[int]) -> Peak:
    """Measure the peak of the logical CPUs with these numbers."""
    call = [sys.executable, "-m", "rl_cluster_benchmark.tools.profile.peak"]
    children = [ChildProcess(call, cores=[core], stderr=subprocess.DEVNULL, text=True) for core in cores]
    try:
        _answers(children)  # all have started
        (alone,) = _answers(children[:1])
        together = _answers(children) if len(cores) > 1 else [alone]
    finally:
        for child in children:
            child.kill()
            child.close()
    return Peak(len(cores), alone, {name: sum(answer[name] for answer in together) for name in alone})


def _answers(children: Sequence[ChildProcess]) -> list[dict[str, float]]:
    """Tell all of them to measure, then wait for what they answer."""
    processes = [child.process for child in children]
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")
            process.stdin.flush()
    lines = [process.stdout.readline() for process in processes if process.stdout is not None]
    if not all(lines):
        raise TrainingFailedError("This machine's peak could not be measured: the process that does it ended.")
    return [json.loads(line) for line in lines]


def _best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest call."""
    work()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _gflops(precision: str) -> float:
    import torch

    speeds = []
    for size in SIZES:
        left, right, out = (torch.rand(size, size).to(getattr(torch, precision)) for _ in range(3))
        seconds = _best(lambda a=left, b=right, c=out: torch.mm(a, b, out=c))  # type: ignore[misc]
        speeds.append(2 * size**3 / seconds / 1e9)
    return max(speeds)


def _copied_gigabytes() -> float:
    """Return the bytes read and written per second by a large copy, in GB."""
    import torch

    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * COPIED_BYTES / _best(lambda: target.copy_(source)) / 1e9


def main() -> None:
    from rl_cluster_benchmark.machine import process

    process.prepare_process(1)
    for number, _ in enumerate(sys.stdin):
        answer = {name: _gflops(name) for name in PRECISIONS} | {"memory": _copied_gigabytes()} if number else {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
