"""A chain: one run directory, a run in it that is disturbed and resumed again and again, and checked each time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import invariants
import psutil
from harness import ROOT, Faulty, Mode

GRACE = 20.0  # seconds from a signal to the end
EVALUATED = 0.3  # share of the good ends after which the agent is evaluated
DAY = 86_400.0
PAIRS = ((15, 15), (1, 1), (1, 15), (2, 15), (10, 10), (15, 1))  # signals that come within a millisecond


@dataclass(frozen=True)
class Kill:
    fault: str
    early: bool
    delay: float


FAULTS = {
    "main": "SIGKILL of the main process (of a node)",
    "group": "SIGKILL of the whole group",
    "worker": "SIGKILL of a worker (A3C, PPO, A2C) or actor",
    "learner": "SIGKILL of a learner",
    "server": "SIGKILL of the process that workers are forked from",
    "launcher": "SIGKILL of the launcher",
    "term": "SIGTERM, 20 s grace",
    "twice": "two signals within a millisecond, 20 s grace",
    "stop": "SIGSTOP of a worker, then SIGCONT",
    "suspend": "SIGSTOP of all processes, then SIGCONT",
    "terminal": "the terminal is closed",
    "nohup": "the terminal is closed, under nohup",
    "shell": "SIGKILL of the shell in the terminal",
    "clock": "the clock goes back by a day",
    "overwrite": "SIGKILL of the group while --overwrite begins",
    "disk": "the disk is full",
    "unmount": "the directory is removed, and mounted again",
}
ON_A_DISK = ("disk", "unmount")  # for these a small one is mounted for each chain


@functools.cache
def may_mount() -> bool:
    """Return whether a file system can be mounted here: in a container even root may not."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, check=False, capture_output=True).returncode == 0
    return False


def faults_of(mode: Mode) -> list[str]:
    absent = set() if may_mount() else set(ON_A_DISK)
    if mode.mode == "sequential":
        absent |= {"worker", "server", "stop"}
    if mode.algorithm != "impala" or mode.mode == "sequential":
        absent.add("learner")
    if mode.mode != "distributed":
        absent.add("launcher")
    return [fault for fault in FAULTS if fault not in absent]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 256 MB, where one can be mounted; else an ordinary folder."""
    keep, disk = folder / "keep", folder / "disk"
    keep.mkdir()
    disk.mkdir()
    if not may_mount():
        yield disk
        return
    _mount("-t", "tmpfs", "-o", "size=256m", "tmpfs", str(keep))
    try:
        _mount("--bind", str(keep), str(disk))
        yield disk
    finally:
        for place in (disk, keep):
            subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@dataclass
class Chain:
    mode: Mode
    output: Path
    folder: Path
    generator: random.Random
    stopped: float

    def run(self, kills: list[Kill]) -> list[dict[str, Any]]:
        self.history: dict[str, Any] = {}
        self.starts = 0
        results = []
        for kill in kills:
            began = time.monotonic()
            done = self._overwrite(kill) if kill.fault == "overwrite" else self._disturb(kill)
            invariants.check_torn(self.output, self.mode)
            invariants.check_newest(self.output, self.history)
            invariants.check_origin(self.output)
            seconds = round(time.monotonic() - began, 2)
            results.append({"mode": self.mode.name, "early": kill.early, "seconds": seconds} | done)
        steps = invariants.check_newest(self.output, self.history)
        with self._start(timesteps=steps + 3000) as run:
            status = run.wait(120)
            assert status == 0, f"--resume after {kills} ended with {status}:\n{run.text}"
            left = run.leftovers()
            assert not left, f"a good end left behind: {left}"
        invariants.check(self.output, self.mode, starts=self.starts, history=self.history)
        invariants.check_ended(self.output, "finished")
        self._evaluate()
        invariants.check_origin(self.output, evaluated=True)
        return results

    def _start(self, *, timesteps: int = 1_000_000_000, how: str = "--resume-if-present", **more: Any) -> Faulty:
        self.starts += 1
        return Faulty(self.mode, self.output, timesteps, (how,), **more)

    def _disturb(self, kill: Kill) -> dict[str, Any]:
        place: Literal["", "terminal", "nohup"] = "nohup" if kill.fault == "nohup" else ""
        if kill.fault in ("terminal", "shell"):
            place = "terminal"
        trigger = self.folder / f"clock{self.starts}"
        environ = {"RLCB_FAULT": json.dumps({"kind": "clock", "file": str(trigger)})} if kill.fault == "clock" else {}
        with self._start(place=place, environ=environ) as run:
            fault, status = self._strike(run, kill, trigger)
            left = run.leftovers()
            assert not left, f"{kill} left behind: {left}\n{run.text}"
            assert "Traceback" not in run.text, run.text
        if status > 128 and fault not in ("main", "group", "launcher") and not kill.early:
            invariants.check_ended(self.output, "interrupted")
            if self.generator.random() < EVALUATED:
                self._evaluate()
                invariants.check_origin(self.output, evaluated=True)
        return {"fault": fault, "status": status}

    def _overwrite(self, kill: Kill) -> dict[str, Any]:
        """Kill a run that is replacing the one before: what is there then is the old one or the new one, whole."""
        before = invariants.content(self.output)
        with self._start(how="--overwrite") as run:
            if kill.early:
                time.sleep(4 * kill.delay)
            else:
                deadline = time.monotonic() + 60
                while invariants.content(self.output) == before and time.monotonic() < deadline:
                    assert run.status() is None, run.text
                    time.sleep(0.005)
                time.sleep(kill.delay / 5)
            run.signal_group(signal.SIGKILL)
            status = run.wait(30)
            left = run.leftovers()
            assert not left, f"{kill} left behind: {left}\n{run.text}"
        if invariants.content(self.output) != before:
            self.history = {}
        return {"fault": "overwrite", "status": status}

    def _strike(self, run: Faulty, kill: Kill, trigger: Path) -> tuple[str, int]:
        """Do it, or, when there is no such process yet, kill the main process: (what was done, how the run ended)."""
        if kill.fault in ("terminal", "shell", "nohup"):
            deadline = time.monotonic() + 60
            while run.own() is None:
                assert time.monotonic() < deadline, f"it did not start:\n{run.text}"
                time.sleep(0.02)
        if kill.early:
            time.sleep(3 * kill.delay)
        else:
            run.wait_for_updates()  # the proof that it goes on after the fault before
            time.sleep(kill.delay)
        if run.status() is not None:
            raise AssertionError(f"it ended by itself with {run.status()}:\n{run.text}")
        if kill.fault in OTHERS:
            return kill.fault, OTHERS[kill.fault](self, run, kill, trigger)
        victims = _victims(run, kill.fault)
        if not victims:  # too early: it has none yet
            victims, kill = run.mains() or [psutil.Process(run.process.pid)], Kill("main", True, 0.0)
        return kill.fault, _end(run, kill, self.generator.choice(victims), self.stopped)

    # Faults that are not the end of one process

    def _signalled_twice(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        first, second = self.generator.choice(PAIRS)
        os.kill(run.process.pid, first)
        os.kill(run.process.pid, second)
        return _ends_with(run, {first, second}, kill.early)

    def _suspended(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        everyone = run.everyone()
        for number, pause in ((signal.SIGSTOP, self.stopped), (signal.SIGCONT, 0.0)):
            for process in everyone:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(pause)
        run.wait_for_updates()
        return _end_well(run)

    def _terminal_closed(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        run.terminal.close()
        return _ends_with(run, {signal.SIGHUP}, kill.early)

    def _under_nohup(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        run.terminal.close()
        run.wait_for_updates()
        return _end_well(run)

    def _shell_killed(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        run.terminal.shell.kill()
        return _ends_with(run, {signal.SIGHUP}, kill.early)

    def _clock_taken_back(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        trigger.touch()
        for file in self.output.rglob("*"):
            with contextlib.suppress(OSError):  # gone, or of the run that replaces it just now
                os.utime(file, (time.time() + DAY * self.generator.random(),) * 2)
        run.wait_for_updates()
        return _end_well(run)

    def _disk_full(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        filler = self.output.parent / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(65_536))
        try:
            status = run.wait(90)
        finally:
            filler.unlink()
        assert status in (1, 2), f"status {status}:\n{run.text}"  # 2: before it has begun
        assert "Cannot write" in run.text, run.text
        return status

    def _unmounted(self, run: Faulty, kill: Kill, trigger: Path) -> int:
        disk = self.output.parent
        subprocess.run(["umount", "--lazy", disk], check=True)
        time.sleep(kill.delay)
        _mount("--bind", str(disk.with_name("keep")), str(disk))
        lines, deadline = run.num_lines(), time.monotonic() + 60
        while run.status() is None and run.num_lines() < lines + 12:  # it has saved since: it did not notice
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
        if run.status() is None:
            return _end_well(run)
        assert run.status() in (1, 2), f"status {run.status()}:\n{run.text}"
        assert any(sentence in run.text for sentence in GONE), run.text
        return run.wait(1)

    def _evaluate(self) -> None:
        """`rlcb evaluate` with the newest checkpoint, its results kept with the run."""
        newest = invariants.newest_checkpoint(self.output)
        call = ["evaluate", "--checkpoint", newest, "--num-episodes", 2, "--num-threads", 1]
        call = [sys.executable, "-m", "rl_cluster_benchmark", *call, "--json", self.output / "evaluation_all.json"]
        done = subprocess.run(list(map(str, call)), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


# What a run says whose directory is not there, or comes back.
GONE = ("Cannot write", "has taken over", "changed while this run was starting", ".pt does not exist")
OTHERS: dict[str, Callable[[Chain, Faulty, Kill, Path], int]] = {
    "twice": Chain._signalled_twice,
    "suspend": Chain._suspended,
    "terminal": Chain._terminal_closed,
    "nohup": Chain._under_nohup,
    "shell": Chain._shell_killed,
    "clock": Chain._clock_taken_back,
    "disk": Chain._disk_full,
    "unmount": Chain._unmounted,
}


def _ends_with(run: Faulty, numbers: set[int], early: bool) -> int:
    """It was told to end by one of these signals: it saves and says so, or, early, may just end."""
    status = run.wait(GRACE)
    expected = {128 + number for number in numbers} | ({-number for number in numbers} if early else set())
    assert status in expected, f"status {status}:\n{run.text}"
    return status


def _end(run: Faulty, kill: Kill, victim: psutil.Process, stopped: float) -> int:
    """Compares how the run ends with how it should."""
    if kill.fault == "group":
        run.signal_group(signal.SIGKILL)
        return run.wait(30)
    if kill.fault == "term":
        run.process.send_signal(signal.SIGTERM)
        return _ends_with(run, {signal.SIGTERM}, kill.early)
    if kill.fault == "stop":
        victim.send_signal(signal.SIGSTOP)
        time.sleep(stopped)
        assert victim.is_running(), f"it did not wait for a process that stood still for {stopped} s:\n{run.text}"
        victim.send_signal(signal.SIGCONT)
        run.wait_for_updates()
        return _end_well(run)
    if kill.fault == "server":
        victim.suspend()  # it forks nobody between the next two lines
    is_replaced = kill.fault == "server" and not victim.children()
    victim.kill()
    if is_replaced:
        try:
            run.wait_for_updates()
        except AssertionError:
            if "could not be started" not in run.text:  # it was asked for a worker just then
                raise
        else:
            return _end_well(run)
    if kill.fault == "worker" and run.mode.algorithm == "impala" and _is_replaced(run, kill):
        run.wait_for_updates()
        return _end_well(run)
    status = run.wait(90)
    expected = [-signal.SIGKILL] if victim.pid == run.process.pid else [1]
    if run.mode.mode == "distributed":
        expected.append(128 + signal.SIGKILL)  # a launcher's is the worst of its nodes'
    assert status in expected, f"status {status}:\n{run.text}"
    if victim.pid != run.process.pid:
        assert "error: " in run.text, run.text
    return status


def _is_replaced(run: Faulty, kill: Kill) -> bool:
    """Return whether another actor took the place of the one killed; while a run starts, it may end instead."""
    deadline = time.monotonic() + 60
    while "Another takes its place" not in run.text:
        if kill.early and run.status() is not None:
            return False
        assert run.status() is None, f"it ended with {run.status()}, and no other actor took its place:\n{run.text}"
        assert time.monotonic() < deadline, f"no other actor took its place:\n{run.text}"
        time.sleep(0.02)
    return True


def _victims(run: Faulty, fault: str) -> list[psutil.Process]:
    own = psutil.Process(run.process.pid)
    if fault in ("group", "term", "launcher"):
        return [own]
    if fault == "main":
        return run.mains()
    if fault == "server":
        return run.servers()
    first = 1 if run.mode.algorithm == "impala" and fault != "learner" else 0
    last = 1 if fault == "learner" else None
    return [worker for workers in run.workers() for worker in workers[first:last]]


def _end_well(run: Faulty) -> int:
    own = run.own()
    assert own is not None, run.text
    own.send_signal(signal.SIGTERM)
    return _ends_with(run, {signal.SIGTERM}, early=False)
