"""The C code under the compiler's sanitizers, valgrind, and memory that ends where its tensors end (guarded.py).

AddressSanitizer and UndefinedBehaviorSanitizer watch the libraries while Python calls them (exercise.py). Nothing in
Python may run under MemorySanitizer, and valgrind knows no AVX-512: these two watch a program in C (memory.c).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.commands import ROOT, environment

from rl_cluster_benchmark.kernels import build

HERE = Path(__file__).parent
WATCHED = "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
WITHOUT_AMX, EMULATED_AMX = "-DNO_AMX", f"-include {ROOT / 'tests' / 'helpers' / 'emulated_amx.h'}"
SECONDS = 1200
pytestmark = [pytest.mark.timeout(2 * SECONDS), pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]


def has_network() -> bool:
    """Whether the CPU has the instructions of network.c."""
    cpu = build._cpu().split()
    return all(name in cpu for name in ("avx512_bf16", "avx512vl", "avx512bw"))


def without_random_addresses() -> list[str]:
    """Return what to put before a command: older AddressSanitizers crash at times where addresses are very random."""
    with contextlib.suppress(OSError):
        if run_it("setarch", "-R", "true").returncode == 0:
            return ["setarch", "-R"]
    return []


@functools.cache
def sanitizer() -> str:
    """Return the library that is to be loaded first; skip the test where gcc or Python does not work with it."""
    path = run_it("gcc", "-print-file-name=libasan.so").stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.c"
        probe.write_text("int main(void) { return 0; }\n")
        compiled = run_it("gcc", *WATCHED.split(), probe, "-o", Path(folder) / "probe")
    if not os.path.isabs(path) or compiled.returncode:
        pytest.skip("this gcc has no AddressSanitizer (Debian: libasan of the gcc at hand; Fedora: libasan)")
    call = [*without_random_addresses(), "env", f"LD_PRELOAD={path}", "ASAN_OPTIONS=detect_leaks=0"]
    started = run_it(*call, sys.executable, "-c", "")
    if started.returncode:
        pytest.skip(f"Python does not start with AddressSanitizer: {started.stderr[-300:]}")
    return path


def exercise(cache: Path, *parts: str, flags: str = "", watched: bool = True) -> subprocess.CompletedProcess[str]:
    env = environment() | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "CC": "gcc"}
    env["RLCB_KERNEL_FLAGS"] = f"{WATCHED} {flags}" if watched else flags
    if watched:  # Python leaks; NumPy and torch were not built to be watched
        env |= {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    call = [*(without_random_addresses() if watched else []), sys.executable, str(HERE / "exercise.py"), *parts]
    return subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


def assert_clean(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.endswith(": clean")]
    assert lines == [f"{part}: clean" for part in parts]


NETWORK_PARTS = ("impala", "nature", "minibatch")
PARTS = ("acting", "training heads", "pooling", *NETWORK_PARTS)
needs_network = pytest.mark.skipif(not has_network(), reason="needs AVX512-BF16")


def test_heads_and_pooling_are_clean(tmp_path):
    parts = PARTS[:3]
    assert_clean(exercise(tmp_path, *parts), *parts)


@needs_network
def test_nothing_is_touched_beyond_its_end(tmp_path):
    """Without a sanitizer: the very instructions that runs use, tiles among them, on guarded memory."""
    assert_clean(exercise(tmp_path, "few", *NETWORK_PARTS, watched=False), *NETWORK_PARTS)


@pytest.mark.long
@needs_network
@pytest.mark.parametrize("flags", ["", WITHOUT_AMX], ids=["of this CPU", "without AMX"])
def test_the_networks_are_clean(flags, tmp_path):
    assert_clean(exercise(tmp_path, *PARTS, flags=flags), *PARTS)
    assert_clean(exercise(tmp_path / "plain", *PARTS, flags=flags, watched=False), *PARTS)


@pytest.mark.long
@needs_network
def test_the_networks_with_tiles_are_clean(tmp_path):
    """In plain C: sanitizers do not see what tiles read."""
    assert_clean(exercise(tmp_path, "few", *NETWORK_PARTS, flags=EMULATED_AMX), *NETWORK_PARTS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("heads.c", "j < heads->num_actions; j++)", "j <= heads->num_actions; j++)", "AddressSanitizer"),
        ("heads.c", "long action = 0;", "long action = heads->num_actions >> (heads->width + 100);", "shift exponent"),
        ("pooling_body.h", "2 * ox + 1 < width ? 2 : 1", "2", "SEGV|AddressSanitizer"),
    ],
)
def test_a_planted_mistake_is_found(file, before, after, says, tmp_path):
    """With copies of the sources that read beyond an end, or shift too far."""
    package = tmp_path / "rl_cluster_benchmark"
    shutil.copytree(ROOT / "rl_cluster_benchmark", package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "kernels" / file
    text = source.read_text()
    assert before in text
    source.write_text(text.replace(before, after, 1))
    env = environment() | {
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "CC": "gcc",
        "PYTHONPATH": str(tmp_path),
    }
    env |= {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0", "RLCB_KERNEL_FLAGS": WATCHED}
    part = "acting" if file == "heads.c" else "pooling"
    call = [*without_random_addresses(), sys.executable, str(HERE / "exercise.py"), part]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 0
    assert any(word in done.stderr for word in says.split("|")), done.stderr[-3000:]


# Memory that nobody has written


def program(folder: Path, compiler: str, *flags: str, network: bool) -> Path:
    files = ["heads.c", "pooling.c", *(["network.c", "nature.c"] if network else [])]
    sources = [str(build.FOLDER / file) for file in files]
    made = folder / "memory"
    call = [compiler, "-g", "-O1", "-w", *flags, *([] if network else ["-DWITHOUT_NETWORK"]), f"-I{build.FOLDER}"]
    subprocess.run([*call, str(HERE / "memory.c"), *sources, "-lm", "-o", str(made)], check=True, timeout=SECONDS)
    return made


def run_it(*call: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, call)], capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind (Debian: apt-get install valgrind)")
@pytest.mark.parametrize("planted", [False, True])
def test_valgrind_finds_nothing_in_heads_and_pooling(planted, tmp_path):
    flags = ("-march=haswell", *(["-DPLANTED"] if planted else []))  # valgrind knows no AVX-512
    done = run_it("valgrind", "-q", "--error-exitcode=3", program(tmp_path, "gcc", *flags, network=False))
    assert done.returncode == (3 if planted else 0), done.stderr[-3000:]
    assert ("uninitialised" in done.stderr) == planted


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("clang") is None, reason="needs clang (Debian: apt-get install clang libclang-rt-14-dev)"
)
@pytest.mark.parametrize("planted", [False, True])
def test_memory_sanitizer_finds_nothing(planted, tmp_path):
    flags = ("-march=native", WITHOUT_AMX, "-fsanitize=memory", *(["-DPLANTED"] if planted else []))
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if run_it("clang", "-fsanitize=memory", probe, "-o", tmp_path / "probe").returncode:
        pytest.skip("this clang has no MemorySanitizer (Debian: apt-get install libclang-rt-14-dev)")
    done = run_it(program(tmp_path, "clang", *flags, network=has_network()))
    assert (done.returncode != 0) == planted, done.stderr[-3000:]
    assert ("use-of-uninitialized-value" in done.stderr) == planted
