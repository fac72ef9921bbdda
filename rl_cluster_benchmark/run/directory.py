"""Where a run's files are, and who may write them."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.files import remove_leftovers

ALGORITHM_NAMES = {"ppo": "PPO", "a2c": "A2C", "a3c": "A3C", "impala": "IMPALA"}


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

    def claim(self, *, may_hold_a_run: bool) -> int:
        """Make the directory and lock it for this process; returns the lock, to be held open.

        A directory that already holds a run is refused, unless that run is to be resumed or overwritten.
        """
        try:
            for directory in (self.root, self.checkpoints, self.logs):
                directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"Cannot write to {self.root} ({error.strerror}); choose another place with --output-dir."
            ) from None
        if not _locked(lock):
            os.close(lock)
            raise UserError(f"{self.root} is in use by another run; choose another --output-dir.")
        if not may_hold_a_run and self.holds_a_run():
            os.close(lock)
            raise UserError(
                f"{self.root} already holds a run. Add --resume to go on with it, --overwrite to replace it, "
                "or choose another --output-dir."
            )
        for directory in (self.root, self.checkpoints, self.logs):
            remove_leftovers(directory)
        return lock

    def remove_run(self) -> None:
        for file in (self.config, self.summary, self.root / "benchmark_metrics.json", self.metrics, self.metrics_log):
            file.unlink(missing_ok=True)
        for file in [*self.checkpoints.glob(f"{self.name}_*.pt"), *self.logs.glob("events.out.tfevents.*")]:
            file.unlink(missing_ok=True)


def _locked(lock: int) -> bool:
    """Twice: whoever looks whether a run is going on (analysis/runs.py) holds the lock for that moment."""
    for _ in range(2):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.05)
    return False


def _steps_in_name(file: Path) -> int:
    digits = file.stem.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1
