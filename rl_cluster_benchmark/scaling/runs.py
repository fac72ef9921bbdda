"""Training runs side by side: started together, watched through their metrics, stopped together.

The rate of a run counts whole updates, after the first one and after every run beside it has made its first one: all of
the measured time, all of them are training. Each ends only when all have been measured.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster_benchmark import config_files
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.execution.workers import die_with_parent
from rl_cluster_benchmark.run.directory import RunDirectory

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_WITHOUT_PROGRESS = 1800.0
SECONDS_TO_STOP = 300.0


@dataclass(frozen=True)
class Rate:
    """What was measured of one run."""

    fps: float
    updates: int
    seconds: float
    shares: dict[str, float]  # of the time by phase
    busy_cores: float  # CPU seconds per second
    summary: dict[str, Any]  # the run's training_summary.json
    update_seconds: tuple[float, ...] = ()  # of each update that counts


def measure(
    configs: Sequence[Config],
    cores: Sequence[Collection[int]],
    folder: Path,
    *,
    seconds: float,
    interrupted: Callable[[], bool],
) -> list[Rate]:
    """Run the configs side by side, each on its cores, for some seconds after they have warmed up."""
    runs: list[TrainingProcess] = []
    try:
        for number, (config, own_cores) in enumerate(zip(configs, cores, strict=True)):
            runs.append(TrainingProcess(config, own_cores, folder / str(number)))
        _watch(runs, seconds, interrupted)
        for run in runs:
            run.process.terminate()
        return [run.rate() for run in runs]
    finally:
        for run in runs:
            run.kill()


def _watch(runs: Sequence[TrainingProcess], seconds: float, interrupted: Callable[[], bool]) -> None:
    """Return when every run has been measured; KeyboardInterrupt when somebody asks to end."""
    began: float | None = None
    last_progress = time.monotonic()
    while True:
        now = time.monotonic()
        if interrupted():
            raise KeyboardInterrupt
        for run in runs:
            if run.process.poll() is not None:
                raise run.failure()
        new_updates = [run.read() for run in runs]
        if any(new_updates):
            last_progress = now
        if began is None:
            if all(run.lines for run in runs):
                began = now
                for run in runs:
                    run.first = len(run.lines) - 1
        elif now - began >= seconds and all(len(run.lines) > run.first + 1 for run in runs):
            return
        if now - last_progress > SECONDS_WITHOUT_PROGRESS:
            raise TrainingFailedError(
                f"No run has made an update for {SECONDS_WITHOUT_PROGRESS / 60:.0f} minutes; use fewer environments."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


class TrainingProcess:
    """`rlcb train` in a process of its own, which dies with this one."""

    def __init__(self, config: Config, cores: Collection[int], folder: Path) -> None:
        folder.mkdir(parents=True)
        config = config_files.build(config_files.to_dict(config), {"output_dir": str(folder / "run")}, source="scaling")
        self.directory = RunDirectory.of(config)
        self.lines: list[dict[str, float]] = []
        self.first = 0  # the line from which time counts
        self._read_so_far = 0
        self._output = folder / "output.txt"
        (folder / "config.yaml").write_text(config_files.to_yaml(config))
        parent = os.getpid()

        def settle() -> None:
            die_with_parent(parent)
            os.sched_setaffinity(0, cores)

        call = [sys.executable, "-m", "rl_cluster_benchmark", "train", "--config", str(folder / "config.yaml")]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                call,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which ends its runs
                preexec_fn=settle,
            )

    def read(self) -> bool:
        """Take in the updates made since the last call; are there any?"""
        with contextlib.suppress(FileNotFoundError), self.directory.metrics_log.open("rb") as file:
            file.seek(self._read_so_far)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read_so_far += len(whole) + len(newline)
            self.lines += [json.loads(line) for line in whole.splitlines()]
            return bool(newline)
        return False

    def rate(self) -> Rate:
        """After it was told to end: wait for that, and take the figures of the time that counts."""
        try:
            self.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            raise TrainingFailedError(f"A run did not end within {SECONDS_TO_STOP:.0f} seconds.") from None
        if self.process.returncode != 128 + signal.SIGTERM:
            raise self.failure()
        start, end = self.lines[self.first], self.lines[-1]
        summary = json.loads(self.directory.summary.read_text())
        seconds = end["time"] - start["time"]

        def mean(name: str) -> float:
            """Over the time that counts, of a metric that is a mean since the start of the run."""
            return (end[name] * end["time"] - start[name] * start["time"]) / seconds

        return Rate(
            fps=(end["step"] - start["step"]) / seconds,
            updates=int(end["update"] - start["update"]),
            seconds=seconds,
            shares={name.removeprefix("time/"): mean(name) for name in end if name.startswith("time/")},
            busy_cores=mean("system/cpu_utilization") * summary["usable_cores"],
            summary=summary,
            update_seconds=tuple(b["time"] - a["time"] for a, b in itertools.pairwise(self.lines[self.first :])),
        )

    def failure(self) -> UserError | TrainingFailedError:
        """Why it ended, in its own words."""
        code = self.process.returncode
        _, found, message = self._output.read_text(errors="replace").rpartition("error: ")
        if code == 2 and found:
            return UserError(message.strip())
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return TrainingFailedError(f"A measured run {how}{f': {message.strip()}' if found else '.'}")

    def kill(self) -> None:
        """With its workers, if it has not ended by itself."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it
                self.process.wait(SECONDS_TO_STOP)
