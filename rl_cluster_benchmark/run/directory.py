"""The directory of a run: where its files are, and the locks that decide which process may write them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rl_cluster_benchmark.config.schema import Config, Mode
from rl_cluster_benchmark.config.traits import TRAITS
from rl_cluster_benchmark.core.atomic_files import (
    cannot_write,
    check_can_write,
    make_directory,
    read_object,
    remove_leftovers,
    sync_directory,
    write_atomically,
)
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError

LOCK = ".lock"
LOOK_SECONDS = 0.2  # for which readers may hold a lock to see whether a run is going on
CLIPS = ("clip.webp", "clip.gif")  # videos of the agent, shown in reports
LOCK_ATTEMPTS = 5


@dataclass(frozen=True)
class Claim:
    """The right to write a run's files: open locks, and the owner's name in the first lock file.

    The name is for filesystems that machines share: a machine that was cut off and comes back when the run goes on
    elsewhere finds the name of a later claim there, and writes nothing more.
    """

    path: Path
    descriptors: tuple[int, ...]
    owner: str

    def check(self) -> None:
        """Raise TrainingFailedError if the file at the lock's path names another owner than this claim."""
        try:
            owner = self.path.read_text(errors="replace")
        except FileNotFoundError:
            return  # the lock file was removed, but nobody has taken over
        if owner != self.owner:
            raise TrainingFailedError("Another process has taken over this run directory; this one writes no more.")

    def release(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class RunDirectory:
    """The places of a run's files."""

    root: Path  # config.yaml, training_summary.json, metrics.json
    checkpoints: Path
    logs: Path  # metrics.jsonl, events.out.tfevents.*
    name: str  # the beginning of checkpoints' file names, such as ppo_sequential

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        name = f"{config.algorithm}_{config.mode}"
        label = f"{config.traits.label}_{config.mode.capitalize()}"
        if config.output_dir is not None:
            root = Path(config.output_dir)
            return cls(root, root / "checkpoints", root / "logs" / label, name)
        logs = Path(config.logging.log_dir) / label
        return cls(logs, Path(config.logging.checkpoint_dir or Path("checkpoints", name)), logs, name)

    @classmethod
    def anywhere_in(cls, root: Path) -> RunDirectory:
        """Return the directory of a run of whatever algorithm and mode, for what concerns all of them."""
        return cls(root, root / "checkpoints", root / "logs" / "PPO_Sequential", "ppo_sequential")

    @property
    def lock(self) -> Path:
        return self.root / LOCK

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
    def benchmark_metrics(self) -> Path:
        """Return the file that holds the summary under an older name."""
        return self.root / "benchmark_metrics.json"

    @property
    def metrics_log(self) -> Path:
        return self.logs / "metrics.jsonl"

    def final_checkpoint(self) -> Path:
        return self.checkpoints / f"{self.name}_final.pt"

    def step_checkpoint(self, steps: int) -> Path:
        return self.checkpoints / f"{self.name}_step_{steps}.pt"

    def step_checkpoints(self) -> list[Path]:
        """Return the checkpoints of steps, the newest first."""
        files = [file for file in _checkpoints(self.checkpoints, self.name) if file != self.final_checkpoint()]
        return sorted(files, key=_steps_in_name, reverse=True)

    def holds_a_run(self) -> bool:
        """Return whether a run was started here; it may not have saved anything yet."""
        return self.config.exists() or bool(_checkpoints(self.checkpoints, self.name))

    def has_something_to_replace(self) -> bool:
        """Return whether anything is here that a new run would replace."""
        return self.a_run_was_here() or any(file.exists() for file in (self.config, self.metrics))

    def a_run_was_here(self) -> bool:
        """Return whether there is a file that only runs write."""
        files = [self.summary, self.benchmark_metrics, *self._metrics_logs()]
        return any(file.exists() for file in files) or bool(self._checkpoints_here())

    def names(self) -> list[str]:
        """Return the names of runs that a new run would replace here.

        A directory of --output-dir belongs to one run, whatever its algorithm and mode; others share --log-dir.
        """
        if self.logs.parent != self.root / "logs":
            return [self.name]
        return [f"{algorithm}_{mode}" for algorithm in TRAITS for mode in get_args(Mode)]

    def log_folders(self) -> list[Path]:
        """Return the existing log folders of the runs that a new run would replace."""
        names = self.names()
        return [folder for folder in self.logs.parent.glob("*_*") if folder.name.lower() in names]

    def _metrics_logs(self) -> list[Path]:
        return [log for folder in self.log_folders() if (log := folder / "metrics.jsonl").exists()]

    def _checkpoints_here(self) -> list[Path]:
        return [file for name in self.names() for file in _checkpoints(self.checkpoints, name)]

    def contents(self) -> str:
        """Return a few words that say which files of a run are here; "" if there are none."""
        count = len(self._checkpoints_here())
        found = [f"{count} checkpoint{'' if count == 1 else 's'}"] if count else []
        found += ["metrics.jsonl"] if self._metrics_logs() else []
        files = (self.summary, self.benchmark_metrics, self.metrics, self.config)
        found += [file.name for file in files if file.exists()]
        return ", ".join(found)

    def check_unchanged(self, seen: str) -> None:
        """Raise TrainingFailedError if `contents()` is no longer `seen`, as when a disk was unmounted or came back.

        What a starting run has decided about an earlier run here is valid only while that does not change.
        """
        now = self.contents()
        if now != seen:
            raise self.changed(seen, now)

    def changed(self, seen: str, now: str) -> TrainingFailedError:
        """Return the error that the directory's contents changed although this process holds its lock."""
        return TrainingFailedError(
            f"{self.root} changed while this run was starting: it held {seen or 'no run'}, then {now or 'no run'}. "
            "Nothing was removed; start the command again."
        )

    @property
    def jobs(self) -> Path:
        """Return the file that names the launches or scheduler jobs which began the run here and may restart it."""
        return self.root / ".begun-by"

    def was_begun_by(self, job: str) -> bool:
        """Return whether an earlier attempt of this job began the run here."""
        try:
            return bool(job) and job in self.jobs.read_text().splitlines() and self.holds_a_run()
        except OSError:
            return False

    def begin_run(self, jobs: Sequence[str]) -> None:
        """Remove the earlier run, and write which jobs begin the new one, before any file of the new run."""
        for folder in dict.fromkeys((self.root, self.checkpoints, *self.log_folders(), self.logs)):
            check_can_write(folder)  # before anything is removed: else the old run would be lost and no new one begun
        self.remove_run()
        sync_directory(self.checkpoints)  # so that a power failure does not bring old checkpoints back
        names = sorted({job for job in jobs if job})
        if names:
            write_atomically(self.jobs, "".join(f"{name}\n" for name in names).encode())

    def claim(self, *, may_hold_a_run: bool, patience: float = 0.0, job: str = "") -> Claim:
        """Make the directory and lock it for this process; return the claim, to be held until the end.

        Raise a UserError if the directory already holds a run, unless `may_hold_a_run` (to resume or overwrite it) or
        an earlier attempt of this job began it. Wait up to `patience` seconds for a directory that is in use. The
        checkpoints have a lock of their own, since they may be in another directory.
        """
        locks = [lock_directory(self.root, self.checkpoints, self.logs, patience=patience)]
        try:
            checkpoints_lock = lock_file(self.checkpoints / f".{self.name}{LOCK}", patience=patience)
            if checkpoints_lock is None:
                raise UserError(
                    f"The checkpoints in {self.checkpoints} are in use by another run; choose another --output-dir or "
                    "--checkpoint-dir."
                )
            locks.append(checkpoints_lock)
            self._check_free(locks[0], may_hold_a_run or self.was_begun_by(job))
            for directory in (self.root, self.checkpoints, self.logs):
                remove_leftovers(directory)
            owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
            os.ftruncate(locks[0], os.pwrite(locks[0], owner.encode(), 0))
        except BaseException as error:
            for lock in locks:
                os.close(lock)
            if isinstance(error, OSError):
                raise cannot_write(self.lock, error) from None
            raise
        return Claim(self.lock, tuple(locks), owner)

    def _check_free(self, lock: int, may_hold_a_run: bool) -> None:
        """Raise a UserError if the directory holds a run but may not, is in use, or holds files that no run wrote."""
        last_owner = os.pread(lock, 1 << 20, 0).decode(errors="replace").split()
        if self.has_something_to_replace() and not last_owner and not self.a_run_was_here():
            names = " and ".join(file.name for file in (self.config, self.metrics) if file.exists())
            raise UserError(
                f"{names} in {self.root} would be replaced, and no run has written it; choose another --output-dir."
            )
        if self.has_something_to_replace() and not may_hold_a_run:
            raise UserError(
                f"{self.root} already holds a run. Add --resume to go on with it, --overwrite to replace it, "
                "or choose another --output-dir."
            )
        if len(last_owner) > 1 and last_owner[0] == socket.gethostname() and _is_open_in(last_owner[1], lock):
            raise UserError(f"{self.root} is in use by another run; choose another --output-dir.")

    def remove_run(self) -> None:
        """Remove the run with its evaluations and clips, which must not be taken for those of the next run.

        The log is removed after the checkpoints, and the config last. So a kill in the middle leaves a run that
        `--resume` can go on with, from a checkpoint that is left or from the beginning.
        """
        for file in [
            self.jobs,
            *self._results(),
            self.summary,
            self.benchmark_metrics,
            *self._checkpoints_here(),
            *(file for name in self.names() for file in _checkpoints(self.checkpoints, name, ".damaged")),
            self.metrics,
            *self._metrics_logs(),
            *(file for folder in self.log_folders() for file in folder.glob("events.out.tfevents.*")),
            self.config,
        ]:
            file.unlink(missing_ok=True)

    def _results(self) -> list[Path]:
        """Return the run's clips and evaluations: all that do not name another run by its id.

        If the run's own id is not known, return all.
        """
        if not self.has_something_to_replace():
            return []
        mine = (read_object(self.summary) or {}).get("run_id")
        found = [self.root / name for name in CLIPS]
        for file in self.root.glob("eval*.json"):
            content = read_object(file) or {}
            of = content.get("origin")
            others = of.get("run_id") if isinstance(of, dict) else None
            if "mean_reward" in content and (mine is None or others in (None, mine)):
                found.append(file)
        return found


def lock_directory(root: Path, *others: Path, patience: float = 0.0) -> int:
    """Make the directories and lock the first for this process; return the lock's descriptor, to be kept open."""
    lock = None
    try:
        lock = lock_file(root / LOCK, patience=patience)
        if lock is None:
            raise UserError(f"{root} is in use by another run; choose another --output-dir.")
        for directory in others:
            make_directory(directory)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        raise UserError(f"Cannot write to {root} ({error.strerror}); choose another place with --output-dir.") from None
    return lock


def lock_file(path: Path, *, shared: bool = False, patience: float = 0.0) -> int | None:
    """Make a file and its directory and lock it; return the descriptor, to be kept open, or None if others have it.

    A lock belongs to the file, not to its name: if the file was removed during the wait, it is made again.
    """
    for _ in range(LOCK_ATTEMPTS):
        make_directory(path.parent)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # the directory was removed meanwhile
            continue
        if not _lock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, patience):
            os.close(lock)
            return None
        try:
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)
    raise UserError(f"{path} cannot be locked: it is removed again and again, or cannot be made.")


def _lock(descriptor: int, kind: int, patience: float) -> bool:
    """Lock a file within `patience` seconds; return False if another process holds the lock.

    On a filesystem without locks, return True: there, only Claim.check() notices a second writer.
    """
    # Wait at least LOOK_SECONDS: a reader that tests whether a run is going on (tools/analysis) holds the lock shortly.
    deadline = time.monotonic() + max(patience, LOOK_SECONDS)
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return True
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.05)


def _is_open_in(pid: str, descriptor: int) -> bool:
    """Return whether another process of this machine has the file open; for filesystems without locks."""
    if pid == str(os.getpid()):
        return False
    own = os.fstat(descriptor)
    for link in Path("/proc", pid, "fd").glob("*"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(link), own):
                return True
    return False


def _checkpoints(folder: Path, name: str, suffix: str = "") -> list[Path]:
    """Return the checkpoints in a folder whose names a run has made; copies under other names are not the run's.

    Files that are not returned are neither resumed from nor removed.
    """
    own = re.compile(rf"{name}_(final|step_[0-9]+)\.pt{re.escape(suffix)}")
    return [file for file in folder.glob(f"{name}_*.pt{suffix}") if own.fullmatch(file.name)]


def _steps_in_name(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])
