"""Compiling the C sources beside this file for the CPU at hand, once, into the user's cache.

RLCB_KERNEL_FLAGS adds flags for the compiler, such as those of its sanitizers (tests/sanitizers): another library.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-shared")
COMPILE_SECONDS = 120
TEMPORARY = ".building-"
HASH_BYTES = hashlib.sha256().digest_size

_has_said = False


def load(source: str, includes: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The compiled library; None without a compiler, with one that cannot compile it, or with RLCB_NO_KERNELS set."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.environ.get("RLCB_NO_KERNELS"):
        return None
    files = [FOLDER / name for name in (source, *includes)]
    try:
        return _from_cache(compiler, files)
    except subprocess.SubprocessError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        problem = error
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = ctypes.CDLL(str(_compiled(compiler, files[0], folder)))
    except (OSError, subprocess.SubprocessError):
        return None
    _say_once(problem)
    return library


def _from_cache(compiler: str, files: Sequence[Path]) -> ctypes.CDLL:
    """The library for these sources and this CPU; compiled now if it is not there, or cannot be used."""
    text = b"".join(file.read_bytes() for file in files)
    key = hashlib.sha256(text + " ".join((compiler, *_flags(), _cpu())).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_cluster_benchmark"
    library = cache / f"{files[0].stem}-{key}.so"
    if _is_whole(library):
        with contextlib.suppress(OSError):  # it needs a C library that is not the one here
            return ctypes.CDLL(str(library))
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in cache.glob(f"{TEMPORARY}*"):  # of a process that was killed while it compiled
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 2 * COMPILE_SECONDS:
                shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=cache, prefix=TEMPORARY) as folder:
        built = _compiled(compiler, files[0], folder)
        _seal(built)
        os.replace(built, library)  # others may be doing the same now
    return ctypes.CDLL(str(library))


def _flags() -> tuple[str, ...]:
    """Return the compiler's flags; RLCB_KERNEL_FLAGS adds some, a sanitizer's for example."""
    return (*FLAGS, *shlex.split(os.environ.get("RLCB_KERNEL_FLAGS", "")))


def _compiled(compiler: str, source: Path, folder: str) -> Path:
    built = Path(folder, "built.so")
    command = [compiler, *_flags(), str(source), "-o", str(built)]
    own_files = os.environ | {"TMPDIR": folder}  # the compiler's own go with the folder, however this ends
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, env=own_files)
    return built


def _seal(library: Path) -> None:
    """Add the file's hash to it: a machine that crashes may leave half a file, and loading that ends the process."""
    with open(library, "r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-HASH_BYTES]).digest() == content[-HASH_BYTES:]


def _say_once(problem: Exception) -> None:
    """In the process that the user has started, not in those that it starts."""
    global _has_said
    if not _has_said and "rl_cluster_benchmark.execution.preload" not in sys.modules:
        _has_said = True
        print(
            f"Compiled code cannot be kept for the next time ({problem}), so each start takes longer; set "
            "XDG_CACHE_HOME to a folder that can be written.",
            flush=True,
        )


def _cpu() -> str:
    """-march=native means something else on another CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith("flags")), platform.machine())
