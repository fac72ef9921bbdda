"""The processes of a run that is going on: found by the lock that its parent holds."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import psutil

SECONDS_BETWEEN_READINGS = 1.0  # of CPU use: the kernel counts it in hundredths of a second


class Processes:
    """The processes of runs; their CPU use is measured from one reading to the next, whoever asks in between."""

    def __init__(self) -> None:
        self._seen: dict[int, psutil.Process] = {}
        self._cpu: dict[int, tuple[float, float]] = {}  # when it was read, and what it was
        self._cores = (time.monotonic(), psutil.cpu_percent(percpu=True))  # the first has nothing to compare with

    def cores(self) -> list[float]:
        """Return how busy each core of the machine was, in percent."""
        if time.monotonic() - self._cores[0] >= SECONDS_BETWEEN_READINGS:
            self._cores = time.monotonic(), psutil.cpu_percent(percpu=True)
        return self._cores[1]

    def of_run(self, path: Path) -> list[dict[str, Any]]:
        """Return the parent and its workers: CPU in percent of a core, resident memory, and the core of each."""
        parent = lock_holder(path / ".lock")
        if parent is None:
            return []
        rows = []
        with contextlib.suppress(psutil.Error):
            for process in (psutil.Process(parent), *psutil.Process(parent).children(recursive=True)):
                if _is_helper(process, parent):
                    continue
                known = self._seen.get(process.pid)
                if known != process:  # compares the time it was started too
                    known = self._seen[process.pid] = process
                    self._cpu.pop(process.pid, None)
                with contextlib.suppress(psutil.Error):  # one that has just ended
                    rows.append(
                        {
                            "pid": known.pid,
                            "role": "parent" if known.pid == parent else "worker",
                            "cpu": self._cpu_of(known),
                            "memory_gb": known.memory_info().rss / 1e9,
                            "core": known.cpu_num(),
                        }
                    )
        return rows

    def _cpu_of(self, process: psutil.Process) -> float:
        read_at, percent = self._cpu.get(process.pid, (-SECONDS_BETWEEN_READINGS, 0.0))
        if time.monotonic() - read_at >= SECONDS_BETWEEN_READINGS:
            percent = process.cpu_percent()
            self._cpu[process.pid] = time.monotonic(), percent
        return percent


def _is_helper(process: psutil.Process, parent: int) -> bool:
    """Return whether it is Python's resource tracker, or the server that workers are forked from."""
    try:
        command = " ".join(process.cmdline())
        is_server = "multiprocessing.forkserver" in command and process.ppid() == parent
    except psutil.Error:
        return True
    return is_server or "resource_tracker" in command


def lock_holder(lock: Path) -> int | None:
    """Return the process that holds a lock, if it is one of this machine that we may see."""
    try:
        inode = str(os.lstat(lock).st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
            pid = int(fields[4])
            if _has_open(pid, lock):
                return pid
    return None


def _has_open(pid: int, file: Path) -> bool:
    """Return whether a process has the file open: the inode alone could be one of another disk."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(entry.path), os.lstat(file)):
                    return True
    return False
