"""Where a run's files are, and who may write them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.run.files import remove_leftovers

LOOK_SECONDS = 0.2
ALGORITHM_NAMES = {"ppo": "PPO", "a2c": "A2C", "a3c": "A3C", "impala": "IMPALA"}


@dataclass(frozen=True)
class Claim:
    """The right to write a run's files: a lock, and a name in it that a later claim replaces.

    The name is for filesystems shared by machines: one that was cut off and comes back late, when the run goes on
    elsewhere, finds another name and writes nothing more.
    """

    descriptor: int
    owner: str

    def check(self) -> None:
        if os.pread(self.descriptor, 1 << 20, 0).decode() != self.owner:
            raise TrainingFailedError("Another process has taken over this run directory; this one writes no more.")

    def release(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class RunDirectory:
    root: Path  # config.yaml, training_summary.json, metrics.json
    checkpoints: Path
    logs: Path  # metrics.jsonl, events.out.tfevents.*
    name: str  # of the checkpoint files: ppo_sequential

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        name = f"{config.algorithm}_{config.mode}"
        label = f"{ALGORITHM_NAMES[config.algorithm]}_{config.mode.capitalize()}"
        if config.output_dir is not None:
            root = Path(config.output_dir)
            return cls(root, root / "checkpoints", root / "logs" / label, name)
        logs = Path(config.logging.log_dir) / label
        return cls(logs, Path(config.logging.checkpoint_dir or Path("checkpoints", name)), logs, name)

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def summary(self) -> Path:
        return self.root / "training_summary.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    @property
    def metrics_log(self) -> Path:
        return self.logs / "metrics.jsonl"

    def final_checkpoint(self) -> Path:
        return self.checkpoints / f"{self.name}_final.pt"

    def step_checkpoint(self, steps: int) -> Path:
        return self.checkpoints / f"{self.name}_step_{steps}.pt"

    def step_checkpoints(self) -> list[Path]:
        """Newest first."""
        files = self.checkpoints.glob(f"{self.name}_step_*.pt")
        return sorted(files, key=lambda file: _steps_in_name(file), reverse=True)

    def holds_a_run(self) -> bool:
        return self.config.exists() or self.metrics_log.exists() or any(self.checkpoints.glob(f"{self.name}_*.pt"))

    def belongs_to(self, job: str) -> bool:
        """Was it last written for this job of a cluster's scheduler?"""
        try:
            return bool(job) and job in (self.root / ".lock").read_text().split()[3:]
        except OSError:
            return False

    def claim(self, *, may_hold_a_run: bool, patience: float = 0.0, jobs: Sequence[str] = ()) -> Claim:
        """Make the directory and lock it for this process; returns the lock, to be held until the end.

        A directory that already holds a run is refused, unless that run is to be resumed or overwritten. One that is
        in use is waited for, up to `patience` seconds.
        """
        lock = lock_directory(self.root, self.checkpoints, self.logs, patience=patience)
        if not may_hold_a_run and self.holds_a_run():
            os.close(lock)
            raise UserError(
                f"{self.root} already holds a run. Add --resume to go on with it, --overwrite to replace it, "
                "or choose another --output-dir."
            )
        for directory in (self.root, self.checkpoints, self.logs):
            remove_leftovers(directory)
        owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex} {' '.join(jobs)}"
        os.ftruncate(lock, 0)
        os.pwrite(lock, owner.encode(), 0)
        return Claim(lock, owner)

    def remove_run(self) -> None:
        for file in (self.config, self.summary, self.root / "benchmark_metrics.json", self.metrics, self.metrics_log):
            file.unlink(missing_ok=True)
        for file in [*self.checkpoints.glob(f"{self.name}_*.pt"), *self.logs.glob("events.out.tfevents.*")]:
            file.unlink(missing_ok=True)


def lock_directory(root: Path, *others: Path, patience: float = 0.0) -> int:
    """Make the directories and lock the first for this process; returns the lock, to be held open."""
    try:
        for directory in (root, *others):
            directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"Cannot write to {root} ({error.strerror}); choose another place with --output-dir.") from None
    if not _lock(lock, patience):
        os.close(lock)
        raise UserError(f"{root} is in use by another run; choose another --output-dir.")
    return lock


def _lock(descriptor: int, patience: float) -> bool:
    """False: somebody else has it. A filesystem that knows no locks lets everybody in; Claim.check() is left."""
    # A moment at least: whoever looks whether a run is going on (analysis/runs.py) holds the lock for it.
    deadline = time.monotonic() + max(patience, LOOK_SECONDS)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return True
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.05)


def _steps_in_name(file: Path) -> int:
    digits = file.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1
