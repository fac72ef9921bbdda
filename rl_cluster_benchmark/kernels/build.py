"""Compiling the C sources beside this file for the CPU at hand, once, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-shared")
COMPILE_SECONDS = 120


def load(source: str, includes: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The compiled library; None without a compiler, with one that cannot compile it, or with RLCB_NO_KERNELS set."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.environ.get("RLCB_NO_KERNELS"):
        return None
    try:
        return ctypes.CDLL(str(_build(compiler, FOLDER / source, [FOLDER / name for name in includes])))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home directory
        return None


def _build(compiler: str, source: Path, includes: Sequence[Path]) -> Path:
    """The shared library for this source and this CPU, from the cache or compiled now."""
    text = b"".join(path.read_bytes() for path in (source, *includes))
    key = hashlib.sha256(text + " ".join((compiler, *FLAGS, _cpu())).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_cluster_benchmark"
    library = cache / f"{source.stem}-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder, "built.so")
            command = [compiler, *FLAGS, str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            os.replace(built, library)
    return library


def _cpu() -> str:
    """-march=native means something else on another CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith("flags")), platform.machine())
