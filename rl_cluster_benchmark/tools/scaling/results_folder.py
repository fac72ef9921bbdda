"""The folder that a command writes measurements to: locked meanwhile, and no earlier results are lost by mistake."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_cluster_benchmark.core.atomic_files import remove_leftovers
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run.directory import lock_directory

RUNS_PREFIX = ".scaling-runs-"


@contextlib.contextmanager
def results_folder(folder: Path, files: Sequence[str], *, overwrite: bool, what: str) -> Iterator[Path]:
    """Hold the lock of a folder for results; yield a folder in it for the runs' own files, which is gone afterwards.

    `files` are the names of the results, and `what` is the word for them. Earlier ones are refused unless they may be
    replaced, and stay until there are new ones. What a killed command left is removed.
    """
    lock = lock_directory(folder)
    try:
        if not overwrite and any((folder / name).exists() for name in files):
            raise UserError(
                f"{folder} already holds {what}; add --overwrite to replace it, or choose another --output-dir."
            )
        remove_leftovers(folder)
        for leftover in folder.glob(f"{RUNS_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=RUNS_PREFIX, dir=folder, ignore_cleanup_errors=True) as runs:
            yield Path(runs)
    finally:
        os.close(lock)
