"""Runs of several processes that a test starts, disturbs and ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from helpers.commands import ROOT, environment
from helpers.forked import Command

WORKERS = ("--mode", "parallel", "--num-workers", 2, "--num-envs-per-worker", 8, "--set", "parallel.pin=never")
RLCB = (sys.executable, "-m", "rl_cluster_benchmark")


@contextmanager
def running(*args: object) -> Iterator[subprocess.Popen[str]]:
    """`rlcb train` with these arguments, in the background; gone afterwards, whatever the test does."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = Command(["train", *args], cwd=ROOT, env=environment(), text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def is_alive(process: psutil.Process) -> bool:
    """Return whether it still runs; a zombie does not, which a container's first process may leave as it is."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def workers_of(process: subprocess.Popen[str] | psutil.Process) -> list[psutil.Process]:
    """The children of its server, in the order of their ranks; a server that ends just now has none."""
    workers = []
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):
            workers += child.children()
    return workers


def wait_for_updates(output: Path, label: str, count: int, process: subprocess.Popen[str], seconds: float = 90) -> None:
    log = output / "logs" / label / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not log.exists() or log.read_text().count("\n") < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_line(text: str, process: subprocess.Popen[str]) -> str:
    """Read its output until the text appears; returns what was read."""
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} never appeared in:\n{read}")


def num_updates(output, label="PPO_Parallel"):
    with suppress(OSError):
        return (output / "logs" / label / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith(("time", "charts/SPS", "system/"))} for line in lines]


def assert_gone(processes, seconds=5.0):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive
