"""A virtual environment for each library, made once and again when its requirements change."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import PeerFailedError

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
TORCH = "2.13.0"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"  # PyPI's own wheel for Linux brings gigabytes of CUDA
DEFAULT_FOLDER = Path.home() / ".cache" / "rlcb-peers"
SECONDS_TO_INSTALL = 3600


def python_of(name: str, folder: Path) -> str:
    """The interpreter of the library's environment, which is made if need be."""
    requirements = REQUIREMENTS / f"{name}.txt"
    place = folder / name
    python, mark = place / "bin" / "python", place / "installed"
    texts = [TORCH, sys.version, requirements.read_text(), (REQUIREMENTS / "envpool.txt").read_text()]
    wanted = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted:
        return str(python)
    print(f"installing {name} into {place} ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", "--clear", str(place)])
    _install_torch(str(python))
    pins = place / "constraints.txt"  # so that nothing replaces it
    pins.write_text(f"torch=={TORCH}+cpu\n")
    _pip(str(python), "--constraint", str(pins), "--requirement", str(requirements))
    mark.write_text(wanted)
    return str(python)


def _install_torch(python: str) -> None:
    """The CPU build, from the index that pip is set to if it has one, else from PyTorch's own."""
    try:
        _pip(python, f"torch=={TORCH}+cpu")
    except PeerFailedError:
        _pip(python, "--index-url", CPU_WHEELS, f"torch=={TORCH}+cpu")


def _pip(python: str, *arguments: str) -> None:
    _call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def _call(call: Sequence[str]) -> None:
    try:
        done = subprocess.run(call, check=False, capture_output=True, text=True, timeout=SECONDS_TO_INSTALL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailedError(f"cannot be installed: {error}") from None
    if done.returncode:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR")]
        raise PeerFailedError(f"cannot be installed: {said[-1][:200] if said else 'pip failed'}")
