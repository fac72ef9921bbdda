"""Atomic writing of files: a reader, or a run killed at any moment, finds the old content or the new, never half."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from rl_cluster_benchmark.core.errors import TrainingFailedError

TEMPORARY_FILE = re.compile(r"\..+\.[^/]*-(?P<pid>\d+)\.tmp")
MAX_OBJECT = 1_000_000  # bytes of a JSON file that read_object takes
SECONDS_TO_WRITE_A_FILE = 3600.0  # at most; an older temporary file counts as a leftover, whoever wrote it


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file of a run whole or not at all; raise TrainingFailedError where that cannot be done."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise cannot_write(path, error) from None


def replace_file(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush to the disk, rename; raise the system's own errors."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """Return the path of a temporary file in the same directory, which no other process uses.

    The name contains host and process id, because two machines may share the directory for a moment when a run moves.
    TEMPORARY_FILE matches such names, so that remove_leftovers can find the files of killed processes.
    """
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def write_json(path: Path, data: Any) -> None:
    write_atomically(path, as_json(data))


def as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def remove_leftovers(directory: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote; leave those of live processes."""
    for file in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if _is_leftover(file):
                file.unlink(missing_ok=True)


def _is_leftover(file: Path) -> bool:
    writer = TEMPORARY_FILE.fullmatch(file.name)
    if writer is None:
        return False
    if time.time() - file.stat().st_mtime > SECONDS_TO_WRITE_A_FILE:
        return True
    is_here = file.name.endswith(f".{socket.gethostname()}-{writer['pid']}.tmp")
    return is_here and (writer["pid"] == str(os.getpid()) or not psutil.pid_exists(int(writer["pid"])))


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading; raise OSError for a device or a pipe (opening a pipe would block)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file")
    return os.fdopen(descriptor, "rb")


def read_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a plain file of at most a megabyte; None if there is none in it."""
    try:
        with open_plain(file) as opened:
            content = json.loads(opened.read(MAX_OBJECT))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def cannot_write(path: Path, error: OSError) -> TrainingFailedError:
    return TrainingFailedError(
        f"Cannot write {path} ({error.strerror or error}). Free some space or choose another --output-dir; "
        "checkpoints already written are intact, and --resume goes on from the newest."
    )


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, synced to the disk so that they survive a power failure."""
    if directory.is_dir():
        return
    if not directory.parent.exists():
        make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # a parent that may be written to but not read cannot be opened for fsync
        sync_directory(directory.parent)


def check_can_write(directory: Path) -> None:
    """Raise TrainingFailedError unless files can be made and removed in this directory."""
    probe = temporary_name(directory / "probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(directory, error) from None


def sync_directory(directory: Path) -> None:
    """Flush a directory to the disk, so that renames and removals in it survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
