"""Writing files so that a reader, or a run killed at any moment, finds the old content or the new, never half of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.errors import TrainingFailedError

TEMPORARY_SUFFIX = ".tmp"


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush to the disk, rename."""
    # Its own for each process: two machines may share the directory for a moment, when a run moves.
    writer = f"{socket.gethostname()}-{os.getpid()}"
    temporary = path.with_name(f".{path.name}.{writer}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def write_json(path: Path, data: Any) -> None:
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())


def remove_leftovers(directory: Path) -> None:
    """Temporary files of a process that was killed while it wrote."""
    for leftover in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        with contextlib.suppress(OSError):
            leftover.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> TrainingFailedError:
    return TrainingFailedError(
        f"Cannot write {path} ({error.strerror or error}). Free some space or choose another --output-dir; "
        "checkpoints already written are intact, and --resume goes on from the newest."
    )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
