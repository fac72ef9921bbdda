"""Compiles the C sources beside this file for this machine's CPU, once, into the user's cache.

RLCB_KERNEL_FLAGS adds compiler flags, such as those of the sanitizers (tests/sanitizers); the cache then keeps a
separate library.
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
    """Return the compiled library, or None if there is no compiler, it fails, or RLCB_NO_KERNELS is set."""
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
    """Return the library for these sources and this CPU; compile it if the cache has none that can be loaded."""
    text = b"".join(file.read_bytes() for file in files)
    key = hashlib.sha256(text + " ".join((compiler, *_flags(), _cpu())).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_cluster_benchmark"
    library = cache / f"{files[0].stem}-{key}.so"
    if _is_whole(library):
        with contextlib.suppress(OSError):  # another machine with another C library may have compiled it
            return ctypes.CDLL(str(library))
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in cache.glob(f"{TEMPORARY}*"):  # folders of processes that were killed while they compiled
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 2 * COMPILE_SECONDS:
                shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=cache, prefix=TEMPORARY) as folder:
        built = _compiled(compiler, files[0], folder)
        _seal(built)
        os.replace(built, library)  # atomic: other processes may be compiling the same library now
    return ctypes.CDLL(str(library))


def _flags() -> tuple[str, ...]:
    """Return the compiler flags, those of RLCB_KERNEL_FLAGS included."""
    return (*FLAGS, *shlex.split(os.environ.get("RLCB_KERNEL_FLAGS", "")))


def _compiled(compiler: str, source: Path, folder: str) -> Path:
    built = Path(folder, "built.so")
    command = [compiler, *_flags(), str(source), "-o", str(built)]
    own_files = os.environ | {"TMPDIR": folder}  # so the compiler's temporary files are removed with the folder
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, env=own_files)
    return built


def _seal(library: Path) -> None:
    """Append the file's hash to it: a crash of the machine may leave half a file, and loading that ends the process."""
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
    """Print a warning that the library cannot be cached, once, and not in worker processes."""
    global _has_said
    if not _has_said and "rl_cluster_benchmark.execution.preload" not in sys.modules:
        _has_said = True
        print(
            f"Compiled code cannot be kept for the next time ({problem}), so each start takes longer; set "
            "XDG_CACHE_HOME to a folder that can be written.",
            flush=True,
        )


def _cpu() -> str:
    """Return the CPU's instruction sets, which are part of the cache key because of -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith("flags")), platform.machine())
