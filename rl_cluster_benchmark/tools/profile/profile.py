"""The course of `rlcb profile`: the machine's peak, a short run that observes itself, the figures, the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.output_files import check_output, write_output
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine import detection, planning, process
from rl_cluster_benchmark.profiling.stages import FOLDER_VARIABLE, STAGE_FILE, TRACED_FILE
from rl_cluster_benchmark.tools.profile import peak, profile_report
from rl_cluster_benchmark.tools.profile.figures import Process, Profile, passes_per_step
from rl_cluster_benchmark.tools.profile.verdict import judge
from rl_cluster_benchmark.tools.scaling.cases import MEASURED
from rl_cluster_benchmark.tools.scaling.measured_runs import SECONDS_WITHOUT_PROGRESS, TrainingProcess
from rl_cluster_benchmark.tools.scaling.results_folder import results_folder
from rl_cluster_benchmark.tools.tune.tuning_space import resolve_envs
from rl_cluster_benchmark.tools.tune.tuning_trials import short_updates

SECONDS_BETWEEN_LOOKS = 0.1
MOST_TRACED_SECONDS = 10.0
SECONDS_TO_WRITE = 300.0
FLAME_SECONDS, SECONDS_TO_DRAW = 2, 30.0


@dataclass(frozen=True)
class ProfileSettings:
    seconds: float  # of the run after its first update
    output_dir: Path
    overwrite: bool
    trace: Path | None
    peak: bool  # measure what the machine can do
    flame: bool


def profile(config: Config, settings: ProfileSettings, signals: Signals) -> int:
    """Measure, print, write; return the exit status."""
    config = _measured(config)
    if settings.trace is not None:
        settings.trace.parent.mkdir(parents=True, exist_ok=True)
        check_output("--trace", settings.trace)
    files, machine = profile_report.FILES, detection.detect()
    with results_folder(settings.output_dir, files, overwrite=settings.overwrite, what="a profile") as folder:
        print(f"CPU: {machine}")
        best = None
        if settings.peak:
            print("Measuring this machine's peak ...", flush=True)
            best = peak.measure(machine.physical_cores[: machine.usable_cores])
        watched = WatchedRun(config, folder, settings, signals)
        try:
            watched.follow()
        except KeyboardInterrupt:
            print("Interrupted: nothing is written.")
            return signals.status or 130
        finally:
            watched.end()
        result = watched.profile(best)
        verdict = judge(result, watched.run_config, machine)
        profile_report.show(result, verdict, watched.run_config)
        profile_report.write(settings.output_dir, result, verdict, watched.run_config)
        watched.keep_files()
    return 0


def _measured(config: Config) -> Config:
    if config.is_distributed:
        raise UserError(
            "rlcb profile trains on one machine: use --mode parallel for what each machine does, or --of DIR for a "
            "distributed run that is over."
        )
    if config.hardware.device != "cpu":
        raise UserError(f"rlcb profile is about CPUs, and hardware.device = {config.hardware.device}; use cpu.")
    config = short_updates(resolve_envs(config, detection.detect()))
    return config_files.with_changes(config, MEASURED, source="config")


class WatchedRun:
    """`rlcb train` in a process of its own, led from stage to stage (observer.py)."""

    def __init__(self, config: Config, folder: Path, settings: ProfileSettings, signals: Signals) -> None:
        self.settings, self.signals, self.folder = settings, signals, folder
        self.notes = folder / "notes"
        self.notes.mkdir()
        (self.notes / STAGE_FILE).touch()
        os.environ[FOLDER_VARIABLE] = str(self.notes.resolve())
        print(f"Training for {settings.seconds:g} s after the first update ...", flush=True)
        self.run = TrainingProcess(config, os.sched_getaffinity(0), folder / "run")
        self.no_flame: str | None = None

    def follow(self) -> None:
        """Lead the run from stage to stage; raise KeyboardInterrupt when somebody asks to end."""
        self._wait(lambda: len(self.run.lines) > 0, "make its first update")
        first = len(self.run.lines) - 1
        self._next_stage()  # MEASURE
        before, began, spent = psutil.cpu_times(percpu=True), time.monotonic(), _cpu_of_all()
        self._wait(
            lambda: time.monotonic() - began >= self.settings.seconds and len(self.run.lines) > first + 1,
            "make another update",
        )
        self.cores, seconds = _busy(before, psutil.cpu_times(percpu=True)), time.monotonic() - began
        self.cpu = {pid: (cpu - spent.get(pid, 0.0)) / seconds for pid, cpu in _cpu_of_all().items()}
        self.run.windows.append((first, len(self.run.lines) - 1))  # without torch's profiler
        self._next_stage()  # MEASURED
        self._wait_for_all(".measured")
        self.run_config = config_files.load(self.run.directory.config)
        learners = self.run_config.impala.num_learners if self._has_roles() else 0
        traced = ["0", str(learners)] if learners else ["0"]  # a process of each role
        (self.notes / TRACED_FILE).write_text(" ".join(traced))
        self._next_stage()  # TRACE
        # Each takes seconds to start torch's profiler; what the others log meanwhile is not what is traced.
        is_tracing = [self.notes / f"{rank}.tracing" for rank in traced]
        self._wait(lambda: all(note.exists() for note in is_tracing), "start torch's profiler", SECONDS_TO_WRITE)
        self._trace()
        if self.settings.flame:
            self.no_flame = _draw_flame_graph(self.run.process.pid, self.folder / profile_report.FLAME)
        self._next_stage()  # DONE
        self._wait_for_all(".json")

    def _has_roles(self) -> bool:
        return self.run_config.traits.has_actors and self.run_config.is_parallel

    def _trace(self) -> None:
        """Let torch's profiler record a whole update, if that is not too long."""
        start, began = len(self.run.lines), time.monotonic()

        def enough() -> bool:
            took = time.monotonic() - began
            return took > MOST_TRACED_SECONDS or (len(self.run.lines) > start + 1 and took > 1)

        self._wait(enough, "make an update while it was traced")

    def _next_stage(self) -> None:
        with (self.notes / STAGE_FILE).open("ab") as file:
            file.write(b".")

    def _wait_for_all(self, suffix: str) -> None:
        """Wait until every process has left its note with this suffix."""
        started = list(self.notes.glob("*.pid"))
        self._wait(
            lambda: all(pid.with_suffix(suffix).exists() for pid in started), "write down what it saw", SECONDS_TO_WRITE
        )

    def _wait(self, condition: Callable[[], bool], what: str, limit: float = SECONDS_WITHOUT_PROGRESS) -> None:
        began = time.monotonic()
        while not condition():
            if self.signals.has_come():
                raise KeyboardInterrupt
            if self.run.poll() is not None:
                raise self.run.failure()
            if time.monotonic() - began > limit:
                raise TrainingFailedError(f"The run did not {what} in {limit / 60:.0f} minutes.")
            self.run.read()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def end(self) -> None:
        """End the run, in good order where that gives a summary."""
        os.environ.pop(FOLDER_VARIABLE, None)
        if self.run.poll() is None and not self.signals.has_come() and list(self.notes.glob("*.json")):
            self.run.send(signal.SIGTERM)
            self.rate = self.run.rate()
        self.run.kill()

    def profile(self, best: peak.Peak | None) -> Profile:
        process.prepare_process(1)
        from rl_cluster_benchmark.tools.profile.cost import of_network

        config, summary = self.run_config, self.rate.summary
        notes = [json.loads(file.read_text()) for file in sorted(self.notes.glob("[0-9]*.json")) if _is_note(file)]
        processes = [Process.of(note, summary["num_learners"]) for note in notes]
        processes.sort(key=lambda process: (process.role != "learner", process.rank))
        batch = config.batch_size if config.traits.has_minibatches else config.rollout_size
        if config.traits.has_actors:
            batch = config.unrolls_per_step * config.training.n_steps
        return Profile(
            processes=processes,
            fps=self.rate.fps,
            cores=self.cores,
            precision=summary["precision"],
            engine=summary["engine"],
            threads=summary["num_threads"],
            batch=batch,
            passes_per_step=passes_per_step(config),
            cost=of_network(config),
            peak=best,
            run=summary,
            parents_cpu=sum(cpu for pid, cpu in self.cpu.items() if pid not in {note["pid"] for note in notes}),
            shares_work=planning.plan(config).shares_work(config),
        )

    def keep_files(self) -> None:
        """Save the trace where it was asked for, and the flame graph beside the rest; say where they are."""
        output = self.settings.output_dir
        if self.settings.trace is not None:
            merged = profile_report.merge_traces(sorted(self.notes.glob("*.trace.json")))
            write_output(self.settings.trace, merged.encode())
            print(f"Saved {self.settings.trace} (open it in chrome://tracing or ui.perfetto.dev)")
        (output / profile_report.FLAME).unlink(missing_ok=True)  # of the profile that this one replaces
        if self.settings.flame and self.no_flame is None:
            shutil.move(self.folder / profile_report.FLAME, output / profile_report.FLAME)
            print(f"Saved {output / profile_report.FLAME}")
        elif self.no_flame:
            print(f"No flame graph: {self.no_flame}.")
        print(f"Saved {output / profile_report.JSON}", flush=True)


def _is_note(file: Path) -> bool:
    return not file.name.endswith(".trace.json")


def _cpu_of_all() -> dict[int, float]:
    """Return the seconds of CPU time of this process and of all that it has started, by their ids."""
    seconds = {}
    for each in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = each.cpu_times()
            seconds[each.pid] = times.user + times.system
    return seconds


def _busy(before: Any, after: Any) -> list[float]:
    """Return the share of the time that each core was not idle."""
    shares = []
    for old, new in zip(before, after, strict=True):
        total = sum(new) - sum(old) - (new.guest - old.guest) - (new.guest_nice - old.guest_nice)
        idle = new.idle + new.iowait - old.idle - old.iowait
        shares.append(max(0.0, 1 - idle / total) if total > 0 else 0.0)
    return shares


def _py_spy() -> str | None:
    """Return where py-spy is, beside this Python or on the path: https://github.com/benfred/py-spy."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def _draw_flame_graph(pid: int, file: Path) -> str | None:
    """Watch the Python code of a process and its children for some seconds; return why there is no picture, or None."""
    program = _py_spy()
    if program is None:
        return "py-spy is not installed (pip install py-spy)"
    call = [
        program, "record", "--pid", str(pid), "--subprocesses", "--duration", str(FLAME_SECONDS), "--output", str(file),
        "--nonblocking",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            call,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FLAME_SECONDS + SECONDS_TO_DRAW,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy did not come to an end ({error})"
    if file.is_file():
        return None
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
    return f"py-spy failed ({lines[0].strip()}); it may need root or ptrace rights"
