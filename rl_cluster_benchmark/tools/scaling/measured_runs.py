"""Training runs side by side: started together, watched through their metrics, stopped together.

The rate of a run counts whole updates, after the first one and after every run beside it has made its first one: all of
the measured time, all of them are training. Each ends only when all have been measured. Runs that are compared with
each other take turns.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.processes.child_process import ChildProcess, error_in, how_it_ended, rlcb
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.analysis.series import GrowingLog

FEWEST_TURNS, LONGEST_TURN = 3, 10.0  # seconds: when several groups of runs share the time, that of each is cut so
WITHOUT_WATCHDOG = 1e6  # seconds: a run that is stopped makes no progress
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


Group = tuple[Sequence[Config], Sequence[Collection[int]], Path]  # configs, the cores of each, a folder for their files


def measure(
    configs: Sequence[Config],
    cores: Sequence[Collection[int]],
    folder: Path,
    *,
    seconds: float,
    interrupted: Callable[[], bool],
) -> list[Rate]:
    """Run the configs side by side, each on its cores, for some seconds after they have warmed up."""
    return measure_in_turns([(configs, cores, folder)], seconds=seconds, interrupted=interrupted)[0]


def measure_in_turns(groups: Sequence[Group], *, seconds: float, interrupted: Callable[[], bool]) -> list[list[Rate]]:
    """Run several groups on the same cores, one group after the other in turns, while the others are stopped.

    Turns are short, so that whatever else the machine does, or how fast it is just now, happens to all of them.
    """
    started: list[list[TrainingProcess]] = []
    alone = len(groups) == 1
    try:
        for configs, cores, folder in groups:
            started.append(runs := [])
            for number, (config, own_cores) in enumerate(zip(configs, cores, strict=True)):
                may_pause = {} if alone else {"training.watchdog": WITHOUT_WATCHDOG}
                runs.append(TrainingProcess(config, own_cores, folder / str(number), may_pause))
            if not alone:
                _turn(runs, 0.0, interrupted)
                _stop(runs)
        share = seconds if alone else seconds / max(FEWEST_TURNS, math.ceil(seconds / LONGEST_TURN))
        taken = [0.0] * len(started)
        order = list(range(len(started)))
        while min(taken) < seconds:
            for group in order:
                runs = started[group]
                _go_on(runs)
                taken[group] += _turn(runs, share, interrupted, after_a_pause=not alone)
                if not alone:
                    _stop(runs)
            order.reverse()  # a drift of the machine favours none
        for runs in started:
            _go_on(runs)
            for run in runs:
                run.send(signal.SIGTERM)
        return [[run.rate() for run in runs] for runs in started]
    finally:
        for runs in started:
            for run in runs:
                run.kill()


def _stop(runs: Sequence[TrainingProcess]) -> None:
    for run in runs:
        run.send_to_all(signal.SIGSTOP)
    for run in runs:
        run.read()


def _go_on(runs: Sequence[TrainingProcess]) -> None:
    for run in runs:
        run.send_to_all(signal.SIGCONT)


def _turn(
    runs: Sequence[TrainingProcess], seconds: float, interrupted: Callable[[], bool], *, after_a_pause: bool = False
) -> float:
    """Measure every run for so long, and for an update at least; return how long it was.

    The first update is not counted, nor is the second after a pause: the first may have been made before it, and told
    after it. Raise KeyboardInterrupt when somebody asks to end.
    """
    skipped = 1 + after_a_pause
    before = [len(run.lines) for run in runs]
    first: list[int] = []  # the line of each from which time counts, once all have made an update
    began = last_progress = time.monotonic()
    while True:
        now = time.monotonic()
        if interrupted():
            raise KeyboardInterrupt
        for run in runs:
            if run.poll() is not None:
                raise run.failure()
        new_updates = [run.read() for run in runs]
        if any(new_updates):
            last_progress = now
        if not first:
            if all(len(run.lines) >= count + skipped for run, count in zip(runs, before, strict=True)):
                began, first = now, [len(run.lines) - 1 for run in runs]
                if not seconds:
                    return 0.0
        elif now - began >= seconds and all(len(run.lines) > line + 1 for run, line in zip(runs, first, strict=True)):
            for run, line in zip(runs, first, strict=True):
                run.windows.append((line, len(run.lines) - 1))
            return now - began
        if now - last_progress > SECONDS_WITHOUT_PROGRESS:
            raise TrainingFailedError(
                f"No run has made an update for {SECONDS_WITHOUT_PROGRESS / 60:.0f} minutes; use fewer environments."
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


class TrainingProcess(ChildProcess):
    """`rlcb train` in a process of its own, which dies with this one."""

    def __init__(
        self, config: Config, cores: Collection[int], folder: Path, changes: Mapping[str, object] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        changes = {"output_dir": str(folder / "run"), **(changes or {})}
        config = config_files.with_changes(config, changes, source="scaling")
        self.directory = RunDirectory.of(config)
        self.lines: list[dict[str, float]] = []
        self.windows: list[tuple[int, int]] = []  # the lines from and to which time counts
        self._log = GrowingLog(self.directory.metrics_log)
        self._output = folder / "output.txt"
        (folder / "config.yaml").write_text(config_files.to_yaml(config))
        call = rlcb("train", "--config", folder / "config.yaml")
        super().__init__(call, output=self._output, cores=cores, at_our_end=signal.SIGKILL)

    def read(self) -> bool:
        """Take in the updates made since the last call; return whether there are any."""
        new = self._log.new_lines()
        self.lines += new
        return bool(new)

    def rate(self) -> Rate:
        """Wait for the end of a run that was told to end; return the figures of the time that counts."""
        try:
            self.process.wait(SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            raise TrainingFailedError(f"A run did not end within {SECONDS_TO_STOP:.0f} seconds.") from None
        if self.status != 128 + signal.SIGTERM:
            raise self.failure()
        summary = json.loads(self.directory.summary.read_text())
        ends = [(self.lines[first], self.lines[last]) for first, last in self.windows]

        def gained(name: str) -> float:
            return sum(end[name] - start[name] for start, end in ends)

        def mean(name: str) -> float:
            """Return the mean, over the time that counts, of a metric that is a mean since the start of the run."""
            return sum(end[name] * end["time"] - start[name] * start["time"] for start, end in ends) / seconds

        seconds = gained("time")
        return Rate(
            fps=gained("step") / seconds,
            updates=int(gained("update")),
            seconds=seconds,
            shares={name.removeprefix("time/"): mean(name) for name in self.lines[-1] if name.startswith("time/")},
            busy_cores=mean("system/cpu_utilization") * summary["usable_cores"],
            summary=summary,
            update_seconds=tuple(
                later["time"] - line["time"]
                for first, last in self.windows
                for line, later in itertools.pairwise(self.lines[first : last + 1])
            ),
        )

    def failure(self) -> UserError | TrainingFailedError:
        """Return the error that says why it has ended, in its own words."""
        message = error_in(self._output)
        if self.status == 2 and message:
            return UserError(message)
        return TrainingFailedError(f"A measured run {how_it_ended(self.status)}{f': {message}' if message else '.'}")
