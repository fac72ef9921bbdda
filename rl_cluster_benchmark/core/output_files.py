"""Files of results that the user names with an option: they may replace earlier results, never a run's records."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rl_cluster_benchmark.core.atomic_files import replace_file
from rl_cluster_benchmark.core.errors import UserError

RECORDS = ("metrics.jsonl", "benchmark.yaml", ".lock", ".benchmark.lock")  # protected in every directory
# Protected only in a directory that holds another of these files, or a .lock.
RECORDS_OF_A_RUN = ("config.yaml", "training_summary.json", "benchmark_metrics.json", "metrics.json")
MARK_OF_PLOTS = b"Software\0rlcb"  # of PNGs
# Plots of older versions have Matplotlib's own mark and our resolution, 110 dots per inch, which is not its default.
MARKS_OF_OLDER_PLOTS = (b"Software\0Matplotlib", b"pHYs" + 2 * (4331).to_bytes(4, "big"))
HEAD_OF_A_PLOT = 1000  # bytes that hold these marks


def check_output(option: str, path: Path, reads: Iterable[Path] = ()) -> None:
    """Raise a UserError, before any work is done, if `path` is a record of a run or a file that the command reads."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory; name a file.")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist.")
    if any(_is_same(path, given) for given in reads):
        raise UserError(f"{option} {path} is a file that this command reads; name another one.")
    if _is_record(path.resolve()):
        raise UserError(f"{option} {path} is part of a run's own record; name another file.")


def cannot_write_to(directory: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write to {directory} ({error.strerror}); choose another --output-dir.")


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _is_record(path: Path) -> bool:
    if path.name in RECORDS or ".pt" in path.suffixes or path.name.startswith("events.out.tfevents"):
        return True
    marks = (".lock", *RECORDS_OF_A_RUN)
    return path.name in RECORDS_OF_A_RUN and any(path.with_name(mark).exists() for mark in marks if mark != path.name)


def is_own(path: Path, mark: bytes) -> bool:
    """Return whether the file may be replaced without asking: it does not exist, or it contains `mark`."""
    try:
        content = path.read_bytes() if path.exists() else mark
    except OSError:
        return False
    is_older_plot = mark == MARK_OF_PLOTS and all(old in content[:HEAD_OF_A_PLOT] for old in MARKS_OF_OLDER_PLOTS)
    return mark in content or is_older_plot


def check_own(path: Path, mark: bytes, advice: str) -> None:
    """Refuse, before any work is done, to replace somebody else's file that has a name of our choice."""
    if not is_own(path, mark):
        raise UserError(f"{path} would be replaced, and this program has not written it; {advice}.")


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the user has named: a plain file atomically, devices and pipes such as /dev/stdout directly."""
    is_device = path.is_absolute() and path.parts[1:2] in (("dev",), ("proc",))
    try:
        if is_device or (path.exists() and not path.is_file()):
            path.write_bytes(content)
        else:
            replace_file(path.resolve(), content)
    except OSError as error:
        raise UserError(f"Cannot write {path} ({error.strerror or error}).") from None
