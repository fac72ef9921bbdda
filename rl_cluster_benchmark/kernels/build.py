"""The C code as a library: which variants there are, which of them this CPU can run, and where a library comes from.

A variant is code for the instruction sets of a kind of CPU: `source/`, in float32, compiled for one of them, or `amx/`,
in bfloat16. Wheels carry the variants of their platform in `built/`; elsewhere the compiler makes those that are
needed, once, in the user's cache. RLCB_KERNELS names the variant to take, RLCB_NO_KERNELS takes none, and
RLCB_KERNEL_FLAGS adds compiler flags, such as those of the sanitizers (tests/sanitizers).
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
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rl_cluster_benchmark.core.errors import UserError

FOLDER = Path(__file__).parent
BUILT = FOLDER / "built"
FLAGS = ("-O3", "-fPIC", "-shared", "-pthread", "-fopenmp-simd")
COMPILE_SECONDS = 600  # it takes five of one core; others may keep that busy
NOT_HERE = "is not among the compiled code here, and no C compiler makes it; see rlcb doctor."
TEMPORARY = ".building-"
HASH_BYTES = hashlib.sha256().digest_size
X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")

_has_said = False


class Variant(NamedTuple):
    """One compilation of the C code: its flags, and what a CPU must have to run it."""

    name: str
    flags: tuple[str, ...]
    machines: tuple[str, ...] = ()  # as `uname -m` says it; () for all
    features: frozenset[str] = frozenset()  # as /proc/cpuinfo says it
    source: str = "source/network.c"
    precision: str = "float32"


VARIANTS = (  # of each precision the best first
    Variant(
        "amx",
        ("-mamx-tile", "-mamx-bf16", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma",
         "-mtune=sapphirerapids", "-mprefer-vector-width=512"),
        X86,
        frozenset({"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "fma"}),
        "amx/amx.c",
        "bfloat16",
    ),
    Variant(
        "avx512",
        ("-DVL=16", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mtune=skylake-avx512",
         "-mprefer-vector-width=512"),
        X86,
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}),
    ),
    Variant("avx2", ("-DVL=8", "-mavx2", "-mfma", "-mtune=haswell"), X86, frozenset({"avx2", "fma"})),
    Variant("neon", ("-DVL=4",), ARM),
    Variant("plain", ("-DVL=4",)),
)  # fmt: skip


class Library(NamedTuple):
    variant: Variant
    code: ctypes.CDLL


@cache
def load(precision: str = "float32") -> Library | None:
    """Return the best variant for a precision that this machine can run, or None if it is neither built nor compiled.

    A variant that RLCB_KERNELS names is the only one, so there is then none for the other precision.
    """
    variants = wanted(precision)
    for variant in variants:
        code = _built(variant) or _compiled_here(variant)
        if code is not None:
            return Library(variant, code)
    if variants and named():
        raise UserError(f"RLCB_KERNELS = {variants[0].name} {NOT_HERE}")
    return None


def wanted(precision: str) -> list[Variant]:
    """Return the variants to try: the one that RLCB_KERNELS names, or all that can run here, the best first."""
    if os.environ.get("RLCB_NO_KERNELS"):
        return []
    only = named()
    found = [only] if only else [variant for variant in VARIANTS if can_run(variant)]
    return [variant for variant in found if variant.precision == precision]


def named() -> Variant | None:
    """Return the variant that RLCB_KERNELS names."""
    possible = [variant for variant in VARIANTS if can_run(variant)]
    name = os.environ.get("RLCB_KERNELS")
    if not name:
        return None
    found = next((variant for variant in VARIANTS if variant.name == name), None)
    here = ", ".join(variant.name for variant in possible)
    if found is None:
        names = ", ".join(variant.name for variant in VARIANTS)
        raise UserError(f"RLCB_KERNELS = {name}: there is no such variant, only {names}; this machine can run {here}.")
    if found not in possible:
        missing = ", ".join(sorted(found.features - cpu_features())) or f"an {found.machines[0]} CPU"
        raise UserError(f"RLCB_KERNELS = {name} needs {missing}, which this CPU lacks; it can run {here}.")
    return found


def can_run(variant: Variant) -> bool:
    """Return whether the CPU has what a variant needs, and the system lets it be used."""
    is_kind = not variant.machines or platform.machine() in variant.machines
    return is_kind and variant.features <= cpu_features()


@cache
def cpu_features() -> frozenset[str]:
    """Return the instruction sets that may be used, by the names of Linux, which leaves out what it cannot use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _features_of_macos()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _features_of_macos() -> frozenset[str]:
    command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(said.lower().split())


def file_name(variant: Variant) -> str:
    """Return the name of a variant's library, which changes with the sources and the flags."""
    text = b"".join(file.read_bytes() for file in sorted(FOLDER.glob("*/*.[ch]")))
    key = hashlib.sha256(text + " ".join(_flags(variant)).encode()).hexdigest()[:16]
    return f"network-{variant.name}-{key}.so"


def _flags(variant: Variant) -> tuple[str, ...]:
    return (*FLAGS, *variant.flags, *shlex.split(os.environ.get("RLCB_KERNEL_FLAGS", "")))


def _built(variant: Variant) -> ctypes.CDLL | None:
    """Return the library that came with the package, or None."""
    return _loaded(BUILT / file_name(variant))


def _loaded(library: Path) -> ctypes.CDLL | None:
    if not _is_whole(library):
        return None
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # another machine with another C library may have compiled it
        return None


def compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _compiled_here(variant: Variant) -> ctypes.CDLL | None:
    """Return the library from the user's cache, compiled first if it is not there; None without a compiler."""
    command = compiler()
    if command is None:
        return None
    try:
        return _from_cache(command, variant)
    except subprocess.SubprocessError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        problem = error
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = ctypes.CDLL(str(compile_to(Path(folder), variant, command)))
    except (OSError, subprocess.SubprocessError):
        return None
    _say_once(problem)
    return library


def _from_cache(command: str, variant: Variant) -> ctypes.CDLL:
    by = hashlib.sha256(command.encode()).hexdigest()[:8]
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_cluster_benchmark"
    library = cache_folder / f"{by}-{file_name(variant)}"
    loaded = _loaded(library)
    if loaded is not None:
        return loaded
    cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for leftover in cache_folder.glob(f"{TEMPORARY}*"):  # folders of processes that were killed while they compiled
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 2 * COMPILE_SECONDS:
                shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(dir=cache_folder, prefix=TEMPORARY) as folder:
        os.replace(compile_to(Path(folder), variant, command), library)  # atomic: others may be compiling it, too
    return ctypes.CDLL(str(library))


def compile_to(folder: Path, variant: Variant, command: str) -> Path:
    """Compile a variant into a folder and return the file, with its own hash at the end."""
    built = folder / file_name(variant)
    words = [command, *_flags(variant), str(FOLDER / variant.source), "-o", str(built), "-lm"]
    own_files = os.environ | {"TMPDIR": str(folder)}  # so the compiler's temporary files are removed with the folder
    subprocess.run(words, check=True, capture_output=True, timeout=COMPILE_SECONDS, env=own_files)
    _seal(built)
    return built


def build_all(folder: Path) -> Iterator[Path]:
    """Compile every variant for this kind of CPU into a folder, whatever this CPU can run: for wheels.

    What the compiler cannot do is left out; without a compiler that is everything.
    """
    command = compiler()
    folder.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        if command and (not variant.machines or platform.machine() in variant.machines):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                yield compile_to(folder, variant, command)


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
