"""Fixtures that tests of several folders use."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers import chromium
from helpers.commands import CELL_SETTINGS, MATRIX, ROOT, environment, rlcb, tiny_run
from helpers.forked import Command
from helpers.made_once import made_once

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.core.stop import ORDERS
from rl_cluster_benchmark.machine import detection

MOST_PROCESSES = 4  # that test side by side: each has its commands and their workers beside it

for number in ORDERS:  # under nohup, or in the background: ignored here as before, but not by the runs that tests start
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What -n auto means: one on each core, and one more, for most tests wait now and then."""
    return min(detection.detect().usable_cores + 1, MOST_PROCESSES)


@pytest.fixture
def needs_pty() -> None:
    """Skip a test where no pseudo terminal can be opened."""
    try:
        ends = os.openpty()
    except OSError as error:
        pytest.skip(f"needs a pseudo terminal: {error}")
    for end in ends:
        os.close(end)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run `rlcb` in this process: (status, stdout, stderr)."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main.main([str(arg) for arg in args])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def launched() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rlcb launch local`; whatever the test does, everything is gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(Command(["launch", "local", *args], cwd=ROOT, env=environment(), text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished tiny run, not to be changed."""

    def make(folder: Path) -> None:
        done = tiny_run(folder / "run", "--set", "training.save_interval=2")
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "trained", make) / "run"


@pytest.fixture(scope="session")
def benchmarked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished benchmark, not to be changed; benchmark.log holds what it printed."""

    def make(folder: Path) -> None:
        done = rlcb("benchmark", *MATRIX, *CELL_SETTINGS, "--output-dir", folder / "matrix")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "matrix" / "benchmark.log").write_text(done.stdout)

    return made_once(tmp_path_factory, "benchmarked", make) / "matrix"


@pytest.fixture(scope="session")
def cells(benchmarked: Path) -> dict[str, Path]:
    """ppo_sequential, ppo_parallel, a2c_sequential, a2c_parallel -> the directory of a real run."""
    return {path.name.partition("_Catch")[0]: path for path in (benchmarked / "cells").iterdir() if path.is_dir()}


@pytest.fixture
def browser():
    if chromium.find() is None:
        pytest.skip(f"no Chromium here ({', '.join(chromium.NAMES)}): pages were NOT tested in a browser")
    browser = chromium.Browser()
    yield browser
    browser.close()
