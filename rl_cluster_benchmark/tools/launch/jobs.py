"""What batch systems have in common: a script is written, submitted, and followed to its end.

`submit` sends any command of this program as a job; `rlcb launch slurm|pbs` send a distributed run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.stop import Signals

SECONDS_BETWEEN_LOOKS = 1.0
# Exit statuses after which going on by itself is right (SIGUSR1, SIGTERM), or would be wrong (done, Ctrl-C; refused, as
# long as nothing has begun).
PREEMPTED = (138, 143)
FINAL = (0, 130)
WRONG_INPUT = 2


@dataclass(frozen=True)
class JobOptions:
    """What a job asks of the batch system; None leaves it to the system's default."""

    name: str = "rlcb"
    nodes: int = 1
    cpus_per_node: int | None = None
    memory: str | None = None  # per node, as the batch system writes it: 16G, 16gb
    time_limit: str | None = None  # as the batch system writes it: HH:MM:SS
    partition: str | None = None  # SLURM's partition, PBS's queue
    account: str | None = None
    log: str | None = None
    activate: str | None = None  # a shell command that prepares the environment
    directory: str = field(default_factory=os.getcwd)
    python: str = sys.executable
    directives: Sequence[str] = ()  # further lines for the batch system, without its prefix
    warning_seconds: int = 120  # how long before its time limit the run is told to save and end


class BatchSystem(Protocol):
    """A system that runs job scripts: SLURM or PBS."""

    submit_command: Sequence[str]

    def seconds(self, time_limit: str) -> int: ...  # of a time limit, read by this system's own rules
    def script(self, command: Sequence[str], options: JobOptions) -> str: ...  # of one node that runs one command
    def log_file(self, job: str, options: JobOptions) -> Path: ...
    def state(self, job: str) -> str | None: ...  # in the system's words; None when it no longer knows the job
    def status(self, job: str) -> int | None: ...  # of a job that has ended, if the system still knows it


def submit(system: BatchSystem, command: Sequence[str], options: JobOptions, script_file: Path) -> str:
    """Send one command of this program (`["train", ...]`) as a job; return the job's number."""
    return submit_script(system, system.script(command, options), script_file)


def submit_script(system: BatchSystem, script: str, script_file: Path) -> str:
    """Write the script to a file that must not exist yet, and send it: a waiting job may still need an older one."""
    name = system.submit_command[0]
    try:
        script_file.parent.mkdir(parents=True, exist_ok=True)
        with script_file.open("x", encoding="utf-8") as file:
            file.write(script)
    except FileExistsError:
        raise UserError(f"{script_file} exists and stays as it is; choose another place with --script.") from None
    except OSError as error:
        raise UserError(
            f"Cannot write the job script {script_file} ({error.strerror}); choose another place with --script."
        ) from None
    try:
        done = ask([*system.submit_command, str(script_file.resolve())])
    except UserError as error:
        if shutil.which(name) is None:
            script_file.unlink()
            raise
        raise UserError(f"{error} If a job was made all the same, it needs {script_file}: the file stays.") from None
    if done.returncode != 0:
        script_file.unlink()  # no job has it
        raise UserError(
            f"{name} refused the job: {(done.stderr or done.stdout).strip() or f'status {done.returncode}'}"
        )
    job = re.search(r"([^\s;]+)(;\S*)?\s*$", done.stdout)
    if job is None:
        raise UserError(f"{name} took {script_file}, but gave no job number; look for the job with its own tools.")
    return job.group(1)


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
        if signals.has_come():
            print(f"rlcb launch: job {job} goes on; its log is {log}", file=sys.stderr, flush=True)
            return signals.status
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
    """Run a command of the batch system, which may be busy for a while, or missing."""
    try:
        return subprocess.run(call, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"{call[0]} is not installed here; run this where jobs are submitted from.") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{call[0]} did not answer within 60 s.") from None


def bash(words: Sequence[str]) -> str:
    return shlex.join(map(str, words))


def job_head(mark: str, directives: Sequence[str], options: JobOptions, log: Path | None = None) -> str:
    """Return the beginning of a job script: its directives behind this mark, directory, output and environment."""
    lines = ["#!/bin/bash", *(f"{mark} {directive}" for directive in directives), ""]
    lines.append(f"cd {bash([options.directory])} || exit 2")
    if log is not None:
        lines.append(f"exec >>{bash([str(log)])} 2>&1 || exit 2")
    lines.append("export PYTHONUNBUFFERED=1 RLCB_PROGRESS=lines")
    if options.activate:
        lines.append(f"{options.activate} || exit 2")
    return "\n".join(lines) + "\n"


def clock(seconds: int) -> str:
    """Write a time limit in the one form that SLURM and PBS read alike."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def warning_before_the_end(limit: int, options: JobOptions) -> int:
    """Return how many seconds before its time limit the run is told to save; half of a limit that is short."""
    return min(options.warning_seconds, limit // 2)
