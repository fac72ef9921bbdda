"""What batch systems have in common: a script is written, submitted, and followed to its end.

`submit` sends any command of this program as a job; `rlcb launch slurm|pbs` send a distributed run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.files import write_atomically
from rl_cluster_benchmark.run.stop import Signals

SECONDS_BETWEEN_LOOKS = 1.0
# Exit statuses after which going on by itself is right (SIGUSR1, SIGTERM), or would be wrong (done, refused, Ctrl-C).
PREEMPTED = (138, 143)
FINAL = (0, 2, 130)


@dataclass(frozen=True)
class JobOptions:
    """What a job asks of the batch system; None leaves it to the system's default."""

    name: str = "rlcb"
    nodes: int = 1
    cpus_per_node: int | None = None
    memory: str | None = None  # per node, as the batch system writes it: 16G, 16gb
    time_limit: str | None = None  # HH:MM:SS
    partition: str | None = None  # SLURM's partition, PBS's queue
    account: str | None = None
    log: str | None = None
    activate: str | None = None  # a shell command that prepares the environment
    directory: str = field(default_factory=os.getcwd)
    python: str = sys.executable
    directives: Sequence[str] = ()  # further lines for the batch system, without its prefix
    warning_seconds: int = 120  # how long before its time limit the run is told to save and end


class BatchSystem(Protocol):
    submit_command: Sequence[str]

    def script(self, command: Sequence[str], options: JobOptions) -> str:
        """A job of one node that runs one command."""
        ...

    def state(self, job: str) -> str | None:
        """In the batch system's words; None when it no longer knows the job."""
        ...

    def log_file(self, job: str, options: JobOptions) -> Path: ...

    def status(self, job: str) -> int | None:
        """The exit status of a job that has ended, if the batch system still knows it."""
        ...

    def cancel(self, job: str) -> None: ...


def submit(system: BatchSystem, command: Sequence[str], options: JobOptions, script_file: Path) -> str:
    """Send one command of this program (`["train", ...]`) as a job; returns the job's number."""
    return submit_script(system, system.script(command, options), script_file)


def submit_script(system: BatchSystem, script: str, script_file: Path) -> str:
    script_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(script_file, script.encode())
    done = ask([*system.submit_command, str(script_file)])
    if done.returncode != 0:
        raise UserError(f"{system.submit_command[0]} refused the job: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip().split(";")[0].split()[-1]


def follow(system: BatchSystem, job: str, options: JobOptions, signals: Signals) -> int:
    """Show a job's log as it grows, through requeues, until the job has ended; Ctrl-C leaves it running."""
    log = system.log_file(job, options)
    position, last_state, ended = 0, None, False
    while not ended:
        state = system.state(job)
        if state != last_state and state is not None:
            print(f"rlcb launch: job {job} is {state}", file=sys.stderr, flush=True)
        ended, last_state = state is None, state
        position = _show_from(log, position)
        if signals.received is not None:
            print(f"rlcb launch: job {job} goes on; its log is {log}", file=sys.stderr, flush=True)
            return 128 + signals.received
        if not ended:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    _show_from(log, position)
    status = system.status(job)
    print(f"rlcb launch: job {job} ended with status {'?' if status is None else status}", file=sys.stderr, flush=True)
    return 1 if status is None else status


def _show_from(log: Path, position: int) -> int:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(position)
        text = file.read()
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        return position + len(text)
    return position


def ask(call: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command of the batch system. It may be busy for a while; it may not be there."""
    try:
        return subprocess.run(call, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"{call[0]} is not installed here; run this where jobs are submitted from.") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{call[0]} did not answer within 60 s.") from None


def bash(words: Sequence[str]) -> str:
    return shlex.join(map(str, words))


def seconds(time_limit: str) -> int:
    """Of HH:MM:SS, as both batch systems write it (SLURM also D-HH:MM:SS and minutes)."""
    days, dash, clock = time_limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()) or len(parts) > 3:
        raise UserError(f"--time {time_limit} is not understood; write it as HH:MM:SS.")
    if len(parts) < 3 and not dash:
        parts = ["0", *parts, "0"][-3:] if len(parts) == 1 else ["0", *parts]
    total = 0
    for part in [*parts, "0", "0"][:3]:
        total = total * 60 + int(part)
    return int(days or 0) * 86400 + total
