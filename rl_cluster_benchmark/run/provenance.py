"""What code a run was made with: this checkout's commit, and the versions of Python and packages."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from rl_cluster_benchmark import __version__

PACKAGES = ("torch", "numpy", "envpool")


def code() -> dict[str, Any]:
    """Return what identifies the code of a run: this checkout's commit, and the versions of Python and packages."""
    versions = {"rl_cluster_benchmark": __version__, "python": platform.python_version(), **package_versions()}
    return {"git_commit": git_commit(), "versions": versions}


def git_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, with a + if files were changed; None outside one."""
    here = Path(__file__).parent
    try:
        call = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(call, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def package_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}
