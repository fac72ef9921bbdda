"""A watchdog for processes that hang: each counts up a number; one that stops counting is reported with its stack.

A worker's number lies in memory that the parent reads. Every change of phase and every optimiser step counts
(core/timing.py), so that a long update does not look like a hang. A worker that waits for others says so: of several
that stand still, those that do not wait are to blame. The main process is watched by a thread of its own, and that
thread by faulthandler, which needs no interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import multiprocessing.reduction
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core import commentary, timing

SIGNAL = signal.SIGUSR2  # asks a worker for its stack
STARTUP_SECONDS = 60.0  # added to the limit until a process counts for the first time
SECONDS_TO_ANSWER = 2.0
SECONDS_BEYOND = 30.0  # added to the limit of a process that waits for others, so that theirs is reached first
OWN_PAUSE = 5.0  # seconds between two looks; after a longer pause it was this process that stood still
BEATS, WAITING = 0, 1
PAGE = 4096


class Pulse:
    """A worker's count of its progress, and the file for its stack, both shared by the worker and its parent."""

    def __init__(self) -> None:
        self._memory_fd = os.memfd_create("rlcb-pulse", os.MFD_CLOEXEC)
        self._stack_fd = os.memfd_create("rlcb-stack", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, PAGE)
        self._map()

    def _map(self) -> None:
        self._numbers = memoryview(mmap.mmap(self._memory_fd, PAGE)).cast("q")

    # In the worker

    def begin(self) -> None:
        """Let this process count from now on, and answer the signal with its stack."""
        faulthandler.register(SIGNAL, file=self._stack_fd, all_threads=True)
        timing.on_beat(self._beat)

    def _beat(self, is_waiting: bool) -> None:
        numbers = self._numbers
        numbers[BEATS] += 1
        numbers[WAITING] = is_waiting

    # In the parent

    @property
    def beats(self) -> int:
        return self._numbers[BEATS]

    @property
    def is_waiting(self) -> bool:
        return bool(self._numbers[WAITING])

    def stack_of(self, pid: int) -> str:
        """Ask the worker for its Python stack and return it, or a sentence that says why there is none."""
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                return f"(process {pid} is stopped: kill -CONT {pid} would let it go on)"
            process.send_signal(SIGNAL)
        except psutil.Error:
            return f"(process {pid} is gone)"
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, size = size, os.fstat(self._stack_fd).st_size
            if size and size == before:
                return os.pread(self._stack_fd, size, 0).decode(errors="replace").strip()
        return f"(process {pid} did not answer: it is in the kernel, state {process.status()})"

    def close(self) -> None:
        self._numbers.release()
        os.close(self._memory_fd)
        os.close(self._stack_fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"fds": [multiprocessing.reduction.DupFd(fd) for fd in (self._memory_fd, self._stack_fd)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memory_fd, self._stack_fd = (fd.detach() for fd in state["fds"])
        self._map()


class Watchdog:
    """The parent's view of its workers' pulses."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._seen: dict[Pulse, tuple[int, float]] = {}
        self._looked_at = time.monotonic()

    def hung(self, pulses: Sequence[Pulse], but: Collection[int]) -> list[int]:
        """Return the ranks of workers that have stood still for too long and do not wait for others.

        If all of them stand still and wait, return all. Workers in `but` are not looked at.
        """
        now = time.monotonic()
        pause = now - self._looked_at
        self._looked_at = now
        still = []
        watched = [rank for rank in range(len(pulses)) if rank not in but]
        for rank in watched:
            pulse = pulses[rank]
            beats, since = self._seen.get(pulse, (-1, now))
            if beats != pulse.beats:
                beats, since = pulse.beats, now
            elif pause > OWN_PAUSE:
                since += pause  # this process was stopped, or waited for a slow disk: the pause does not count
            self._seen[pulse] = beats, since
            if now - since > self.limit + (STARTUP_SECONDS if beats == 0 else 0.0):
                still.append(rank)
        to_blame = [rank for rank in still if not pulses[rank].is_waiting]
        return to_blame or (still if len(still) == len(watched) else [])

    def sentence(self, stack: str) -> str:
        return f"made no progress for {self.limit:g} s (training.watchdog); it was here:\n{stack}"


def limit_of(config: Config) -> float:
    """Return after how many seconds without progress a process counts as hung.

    On several machines it is longer than cluster.timeout, so that a lost machine is reported as such.
    """
    limit = config.training.watchdog
    return max(limit, config.cluster.timeout + SECONDS_BEYOND) if config.is_distributed else limit


def longest_hang(config: Config) -> float:
    """Return after how many seconds, at most, a main process that hangs has ended itself."""
    return limit_of(config) + SECONDS_BEYOND + STARTUP_SECONDS


@contextlib.contextmanager
def watched(
    limit: float, *, is_parent: bool, waits_for: Callable[[], Path | None] = lambda: None
) -> Iterator[None]:  # fmt: skip
    """Watch this process within the context: if it makes no progress for `limit` seconds, print its stack and end it.

    A parent gets SECONDS_BEYOND more, since it may be waiting for its workers. `waits_for` returns the file that is
    being written, if any, for the message.
    """
    beats, ended = 0, threading.Event()
    limit += SECONDS_BEYOND if is_parent else 0.0

    def beat(is_waiting: bool) -> None:
        nonlocal beats
        beats += 1

    def watch() -> None:
        seen, since, armed_at = -1, time.monotonic(), 0.0
        looked_at = since
        while not ended.wait(min(1.0, limit / 4)):
            now = time.monotonic()
            if seen != beats or now - looked_at > OWN_PAUSE:
                seen, since = beats, now
            looked_at = now
            allowed = limit + (STARTUP_SECONDS if seen == 0 else 0.0)
            if now - since > allowed:
                file = waits_for()
                what = f"; it waits for the disk to take {file}" if file else ""
                _say_and_end(f"error: The main process made no progress for {limit:g} s (training.watchdog){what}.")
            if now - armed_at > limit / 4:  # for a hang that holds the interpreter lock, and so stops this thread, too
                armed_at = now
                faulthandler.dump_traceback_later(2 * limit + STARTUP_SECONDS, exit=True, file=commentary.stderr())

    thread = threading.Thread(target=watch, name="rlcb-watchdog", daemon=True)
    timing.on_beat(beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)
        faulthandler.cancel_dump_traceback_later()
        timing.on_beat(None)


def _say_and_end(sentence: str) -> None:
    comfort = "The last checkpoint is intact, and --resume goes on from it. It was here:"
    with contextlib.suppress(Exception):
        commentary.say(f"{sentence} {comfort}\n")
        faulthandler.dump_traceback(file=commentary.stderr(), all_threads=True)
    os._exit(1)
