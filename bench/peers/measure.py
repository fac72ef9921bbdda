"""One training run in a process of its own: speed from its report, memory and CPU time of it and all it has started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rl_cluster_benchmark.processes.pool import die_with_parent

HERE = Path(__file__).resolve().parent
WARM_UP = 5.0  # seconds of training that do not count, the first update in any case
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_BETWEEN_FIGURES = 1.0  # of CPU time; looking costs CPU time itself
SECONDS_BETWEEN_MEMORY = 4.0  # at least, and 100 times as long as a reading takes: a library may have many processes
SECONDS_WITHOUT_PROGRESS = 1800.0
SECONDS_TO_STOP = 60.0


class PeerFailedError(Exception):
    """Why there is no result, in a sentence."""


@dataclass(frozen=True)
class Measurement:
    fps: float
    updates: int
    seconds: float
    memory: int  # bytes, the most that was seen: proportional set size of the process tree
    busy_cores: float
    others_busy: float  # cores that everything else on the machine kept busy meanwhile
    facts: dict[str, Any]  # what the script reported, with the work per environment step


def measure(call: Sequence[str], log: Path, *, seconds: float, python_path: Sequence[str]) -> Measurement:
    """Run until some seconds have been measured in whole updates, then end it."""
    with Training(call, log, python_path) as training:
        while not training.enough(seconds):
            if not training.look():
                raise PeerFailedError(training.reason())
            time.sleep(SECONDS_BETWEEN_LOOKS)
        training.stop()
        return training.result()


def run_to_end(call: Sequence[str], log: Path, *, python_path: Sequence[str]) -> list[dict[str, Any]]:
    """Let a script end by itself; returns the lines of its report."""
    with Training(call, log, python_path) as training:
        while training.look():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        training.read()
        if training.process.returncode:
            raise PeerFailedError(training.reason())
        return training.updates


class Training:
    def __init__(self, call: Sequence[str], log: Path, python_path: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="peers", ignore_cleanup_errors=True)
        self._report, self._log = Path(self._folder.name) / "report.jsonl", log
        self._read_so_far, self._last_progress = 0, time.monotonic()
        self._next_figures, self._next_memory = 0.0, 0.0
        self.updates: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._cpu: list[tuple[float, float, float]] = []  # (time, CPU seconds so far, those of the whole machine)
        self._tree: dict[int, psutil.Process] = {}
        self._memory = 0
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent), *python_path]),
            "TMPDIR": self._folder.name,
            "CUDA_VISIBLE_DEVICES": "",
        }
        env.pop("OMP_NUM_THREADS", None)  # each library chooses
        parent = os.getpid()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*call, "--report", str(self._report)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._folder.cleanup()

    def look(self) -> bool:
        """Take in what is new; is it still running?"""
        if self.process.poll() is not None:
            return False
        now = time.monotonic()
        if self.read():
            self._last_progress = now
        if now - self._last_progress > SECONDS_WITHOUT_PROGRESS:
            raise PeerFailedError(f"no update within {SECONDS_WITHOUT_PROGRESS / 60:.0f} minutes")
        if now >= self._next_figures:
            self._take_figures(now)
            self._next_figures = now + SECONDS_BETWEEN_FIGURES
        return True

    def read(self) -> bool:
        """Take in what was reported since the last call; was there any update?"""
        before = len(self.updates)
        with contextlib.suppress(FileNotFoundError), self._report.open("rb") as file:
            file.seek(self._read_so_far)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read_so_far += len(whole) + len(newline)
            for line in map(json.loads, whole.splitlines()):
                if "facts" in line:
                    self.facts |= line["facts"]
                else:
                    self.updates.append(line)
        return len(self.updates) > before

    def _take_figures(self, now: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self._tree |= {process.pid: process for process in (root, *root.children(recursive=True))}
        spent, memory = 0.0, 0
        look_at_memory = now >= self._next_memory
        for process in self._tree.values():
            with contextlib.suppress(psutil.Error):
                spent += sum(process.cpu_times()[:4])  # its own, and of children that have ended
                if look_at_memory:
                    memory += process.memory_full_info().pss
        machine = psutil.cpu_times()
        self._cpu.append((now, spent, sum(machine) - machine.idle - machine.iowait - machine.guest))
        if look_at_memory:
            self._memory = max(self._memory, memory)
            self._next_memory = now + max(SECONDS_BETWEEN_MEMORY, 100 * (time.monotonic() - now))

    def _window(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The updates between which time counts: from the first after the warm-up to the last."""
        if not self.updates:
            return None
        began = self.updates[0]["time"]
        counted = [line for line in self.updates[1:] if line["time"] >= began + WARM_UP]
        return (counted[0], counted[-1]) if counted and counted[-1]["env_steps"] > counted[0]["env_steps"] else None

    def enough(self, seconds: float) -> bool:
        window = self._window()
        return window is not None and window[1]["time"] - window[0]["time"] >= seconds

    def stop(self) -> None:
        """Ask it to end: ours then says what it has done."""
        self._next_memory = 0.0  # also of a run that was shorter than the time between looks
        self._take_figures(time.monotonic())
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_STOP)
        lines = len(self.updates)
        self.read()
        del self.updates[lines:]

    def result(self) -> Measurement:
        window = self._window()
        assert window is not None
        start, end = window
        seconds, steps = end["time"] - start["time"], end["env_steps"] - start["env_steps"]
        busy, machine_busy = ((b - a) / seconds for a, b in zip(self._cpu_at(start), self._cpu_at(end), strict=True))
        counted = {
            "parameters": end["parameters"],
            "optimizer_steps_per_step": (end["optimizer_steps"] - start["optimizer_steps"]) / steps,
            "samples_per_step": (end["trained_samples"] - start["trained_samples"]) / steps,
        }
        return Measurement(
            fps=steps / seconds,
            updates=sum(start["time"] < line["time"] <= end["time"] for line in self.updates),
            seconds=seconds,
            memory=self._memory,
            busy_cores=busy,
            others_busy=max(0.0, machine_busy - busy),
            facts=counted | self.facts,
        )

    def _cpu_at(self, line: dict[str, Any]) -> tuple[float, float]:
        """CPU seconds of the library, and of the machine, at an update."""
        times, spent, machine = zip(*self._cpu, strict=True)
        return float(np.interp(line["time"], times, spent)), float(np.interp(line["time"], times, machine))

    def reason(self) -> str:
        """The last thing it said."""
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{how}: {lines[-1][:200]}" if lines else how

    def _kill(self) -> None:
        """It and everything it has started."""
        with contextlib.suppress(psutil.Error):
            self._tree |= {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}
        if self.process.poll() is None:
            self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for process in self._tree.values():
            with contextlib.suppress(psutil.Error):  # psutil compares times of birth: no stranger is killed
                process.kill()
