"""What one process of the tests makes and all of them read: `make test` has several."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name, filled by whoever needs it first; the others wait, and none may change it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    place, made = folder / name, folder / f"{name}.made"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)  # whoever began it has failed
            place.mkdir()
            make(place)
            made.touch()
    return place
