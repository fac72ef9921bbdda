"""Removing what a benchmark has written, and nothing else: whatever somebody else has put there stays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_cluster_benchmark.core.atomic_files import remove_leftovers, sync_directory
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run.directory import LOCK, RunDirectory, lock_file
from rl_cluster_benchmark.tools.analysis.runs import UnusableRunError, load_run
from rl_cluster_benchmark.tools.reports.report import FILES as REPORT_FILES

EVALUATIONS = ("evaluation_train.json", "evaluation_test.json", "evaluation_all.json")  # that a benchmark makes
SHOWN = 5  # of the files that stay


def log_of(cell: Path) -> Path:
    return cell.with_name(f"{cell.name}.log")


def lock_of(cell: Path) -> Path:
    """Return the file that a job with --cell locks; the cell's run has a lock of its own."""
    return cell.with_name(f".{cell.name}{LOCK}")


@contextlib.contextmanager
def runs_locked(cells: Sequence[Path]) -> Iterator[None]:
    """Hold the locks of these cells' runs, as far as there are runs; refuse if one of them is going on."""
    with contextlib.ExitStack() as stack:
        for cell in cells:
            if cell.is_symlink() or not (cell / LOCK).is_file():
                continue
            lock = lock_file(cell / LOCK)
            if lock is None:
                raise UserError(
                    f"The run in {cell} is going on, and nothing was removed; wait until it has ended, "
                    "or choose another --output-dir."
                )
            stack.callback(os.close, lock)
        yield


def what_goes(directory: Path, cells: Sequence[Path]) -> str:
    """Return what remove() would remove, in a few words."""
    states = [state for cell in cells if (state := _state(cell)) is not None]
    finished = states.count("finished")
    report = [name for name in REPORT_FILES if (directory / name).exists()]
    parts = [f"{len(states)} cell{'' if len(states) == 1 else 's'} ({finished} finished)"] if states else []
    parts += ["the report"] if report else []
    return " and ".join(parts) or "nothing but the plan"


def _state(cell: Path) -> str | None:
    if cell.is_symlink():
        return None
    try:
        return load_run(cell).state
    except UnusableRunError:
        return "unreadable" if cell.is_dir() else None


def remove_report(directory: Path) -> None:
    for name in REPORT_FILES:
        (directory / name).unlink(missing_ok=True)


def remove_cells(cells: Sequence[Path], *, keep_locks: bool = False) -> None:
    """Remove these cells' runs, evaluations and logs, and the directories that are empty then; say what stays.

    A link is removed, but not what it leads to. The caller holds the locks. When this returns, a power failure brings
    nothing back.
    """
    left: list[Path] = []
    for cell in cells:
        if cell.is_symlink():
            cell.unlink()
        elif cell.is_dir():
            _remove_run(cell)
            left += [file for file in sorted(cell.rglob("*")) if not file.is_dir()]
        log_of(cell).unlink(missing_ok=True)
        if not keep_locks:
            lock_of(cell).unlink(missing_ok=True)
    for parent in {cell.parent for cell in cells if cell.parent.is_dir()}:
        sync_directory(parent)
    if left:
        names = ", ".join(map(str, left[:SHOWN])) + (f" and {len(left) - SHOWN} more" if len(left) > SHOWN else "")
        print(f"These stay, for no run has written them: {names}", flush=True)


def _remove_run(cell: Path) -> None:
    run = RunDirectory.anywhere_in(cell)
    run.remove_run()
    for name in run.names():
        (run.checkpoints / f".{name}{LOCK}").unlink(missing_ok=True)
    for folder in run.log_folders():
        remove_leftovers(folder)
        _remove_if_empty(folder)
    for file in (*EVALUATIONS, "clip.webp"):  # one that is damaged tells not whose it is
        (cell / file).unlink(missing_ok=True)
    for directory in (cell / "checkpoints", cell / "logs", cell):
        remove_leftovers(directory)
    for directory in (cell / "checkpoints", cell / "logs"):
        _remove_if_empty(directory)
    (cell / LOCK).unlink(missing_ok=True)  # whoever waits for it finds that it is gone (lock_file)
    _remove_if_empty(cell)
    if cell.is_dir():
        sync_directory(cell)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
