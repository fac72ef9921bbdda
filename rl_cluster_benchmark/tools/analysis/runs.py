"""Runs as they lie on the disk, in whatever state: running, finished, interrupted, failed, or no run at all.

Nothing is written or locked for longer than a look, no path that a file names is followed, and no file is read that
lies outside the run's own directory: run directories may come from strangers.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.run.directory import LOCK, RunDirectory
from rl_cluster_benchmark.tools.analysis.evaluations import ANY_NAME, Evaluation, load_evaluations
from rl_cluster_benchmark.tools.analysis.run_files import (
    LeftOut,
    Summary,
    UnusableRunError,
    load_config,
    load_series,
    load_summary,
    summary_of,
)
from rl_cluster_benchmark.tools.analysis.series import Series

State = Literal["running", "finished", "interrupted", "failed"]

MARKS = ("training_summary.json", "benchmark_metrics.json", "metrics.jsonl")  # files that nobody but a run writes
MAX_DEPTH = 6
NO_RUNS_BELOW = ("venv", "node_modules", "__pycache__")
OF_A_RUN = ("checkpoints", "logs")  # folders in which no other run is looked for
MAX_RUNS = 10_000
KILLED = "it ended without a summary: killed, or the machine went down"


@dataclass(frozen=True)
class RunRecord:
    """A run, as its files tell of it."""

    path: Path
    config: Config
    state: State
    reason: str | None
    summary: Summary  # of the file, or made from the log while there is none
    series: Series
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # by levels
    left_out: tuple[LeftOut, ...] = ()  # evaluations that are not of it
    doubts: tuple[str, ...] = ()  # what in its files does not go together

    @property
    def algorithm(self) -> str:
        return self.config.traits.label

    @property
    def mode(self) -> str:
        return self.config.mode

    @property
    def game(self) -> str:
        return self.config.env.game or self.config.env.name

    @property
    def seed(self) -> int:
        return self.config.env.seed

    @property
    def notes(self) -> list[str]:
        """Return what does not go together in its files, and which evaluations are not of it."""
        return [*self.doubts, *(f"{item.path.name}: {item.reason}" for item in self.left_out)]

    @property
    def facts(self) -> dict[str, Any]:
        """Return what lists of runs tell of each."""
        return {
            "algorithm": self.algorithm,
            "mode": self.mode,
            "seed": self.seed,
            "steps": self.summary.total_timesteps,
            "seconds": self.summary.duration_hours * 3600,
            "state": self.state,
            "reason": self.reason,
            "notes": self.notes,
        }

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what a copy has in common with the run, and no other run has: not even a copy that went on."""
        s = self.summary
        measured = (s.duration_hours, s.avg_fps, s.final_fps, s.peak_memory_gb)
        return (s.run_id, s.total_timesteps, s.total_updates, *measured)


def load_runs(
    paths: Iterable[Path], *, unfinished: bool = False, evaluations: Sequence[str] = ANY_NAME
) -> tuple[list[RunRecord], list[LeftOut]]:
    """Return the runs in these directories or below them, and what was left out, with the reason."""
    runs: list[RunRecord] = []
    left_out: list[LeftOut] = []
    known: dict[object, Path] = {}
    for path in dict.fromkeys(run for given in paths for run in _expand(given)):
        try:
            place = os.path.realpath(path)
            if known.setdefault(place, path) is not path:
                raise UnusableRunError(f"is {known[place]} by another name; a run counts once")
            run = load_run(path, evaluations)
            require_usable(run, unfinished)
            if known.setdefault(run.identity, path) is not path:
                raise UnusableRunError(f"is a copy of {known[run.identity]}; a run counts once")
            runs.append(run)
            left_out += run.left_out
        except UnusableRunError as error:
            left_out.append(LeftOut(path, str(error)))
    return runs, left_out


def require_usable(run: RunRecord, unfinished: bool) -> None:
    if not len(run.series["step"]):
        raise UnusableRunError(f"{run.state}, no update is in its log")
    if run.state != "finished" and not unfinished:
        why = f" ({run.reason})" if run.reason else ""
        raise UnusableRunError(f"{run.state}{why}; --unfinished takes it in as it is")


def _expand(path: Path) -> list[Path]:
    if is_run(path):
        return [path]
    return list(find_runs(path)) or [path]


def is_run(path: Path) -> bool:
    """Return whether a run has written there; a config.yaml alone may be anybody's."""
    try:
        if any((path / mark).is_file() for mark in MARKS):
            return True
        has_config = (path / "config.yaml").exists()
        if not has_config and not (path / "checkpoints").is_dir():
            return False
        was_claimed = (path / LOCK).is_file() and (path / LOCK).stat().st_size > 0  # it names the run's process
        return was_claimed or (has_config and RunDirectory.anywhere_in(path).a_run_was_here())
    except OSError:  # a directory that may not be entered
        return False


def find_runs(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the directories that look like a run, in order of their names; links are not followed."""
    yield from itertools.islice(_walk(root, depth), MAX_RUNS)


def _walk(root: Path, depth: int) -> Iterator[Path]:
    passed_over: tuple[str, ...] = NO_RUNS_BELOW
    if is_run(root):
        yield root
        passed_over += OF_A_RUN
    try:
        entries = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for name in sorted(entries) if depth > 0 else ():
        if name.startswith(".") or name in passed_over:
            continue
        yield from _walk(root / name, depth - 1)


def load_run(path: Path, evaluations: Sequence[str] = ANY_NAME) -> RunRecord:
    """Return the run in a directory, with its evaluations in files of these names.

    Raise UnusableRunError with the reason, whatever is wrong with its files.
    """
    try:
        return _load_run(path, evaluations)
    except UnusableRunError:
        raise
    except Exception as error:  # one stranger's run must not keep the others from being read
        raise UnusableRunError(f"cannot be read ({type(error).__name__}: {str(error)[:200]})") from None


def _load_run(path: Path, names: Sequence[str]) -> RunRecord:
    if not path.exists():
        raise UnusableRunError("does not exist")
    if not path.is_dir():
        raise UnusableRunError("is a file, not the directory of a run")
    if not is_run(path):
        raise UnusableRunError("holds no run: there is neither a summary nor a log nor a checkpoint of one")
    running = is_running(path)
    config = load_config(path, running)
    series = load_series(path, config)
    summary = load_summary(path, config)
    last = series["update"][-1] if len(series["update"]) else 0
    state: State
    if has_ended := not running and summary is not None and summary.total_updates >= last:
        state, reason = summary.state, summary.reason
    else:
        state, reason = ("running", None) if running else ("interrupted", KILLED)
        summary = summary_of(series, "interrupted")
    evaluations, left_out = load_evaluations(path, config, summary, has_ended=has_ended, names=names)
    doubts = tuple(_doubts(config, summary, last))
    return RunRecord(path, config, state, reason, summary, series, evaluations, tuple(left_out), doubts)


def _doubts(config: Config, summary: Summary, last_logged: float) -> list[str]:
    """Return what to tell about the run's figures: other conditions after a resume, a log that ends too early."""
    found = []
    if summary.changes:
        changes = ", ".join(f"{name} {values}" for name, values in summary.changes.items())
        found.append(f"it was not trained under the same conditions throughout ({changes}): its speed is their mean")
    missing = summary.total_updates - last_logged
    if last_logged and missing >= config.training.log_interval:
        ends = f"its log ends at update {last_logged:,.0f}, its summary at {summary.total_updates:,.0f}"
        found.append(f"{ends}: the log is of another run, or cut short")
    return found


def is_running(path: Path) -> bool:
    """Return whether a process holds the run's lock; a shared lock is tried for a moment to find out."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
