"""The C code under the compilers' sanitizers, valgrind, and memory that ends where its tensors end (guarded.py).

AddressSanitizer and UndefinedBehaviorSanitizer watch the library while Python calls it (exercise.py). Nothing in Python
may run under MemorySanitizer or ThreadSanitizer, and it is slow under valgrind: these watch a program in C (memory.c).
Every variant that this CPU can run is watched, that for AMX with its tiles in plain C: what a tile reads is not seen by
a sanitizer. valgrind knows no AVX-512.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ROOT, environment

from rl_cluster_benchmark.kernels import build

HERE = Path(__file__).parent
SMALL_PAGES = "-DPAGE=8"  # no more memory than is asked for, but for the two floats that nature.h reads behind its end
UNDEFINED = "undefined,float-cast-overflow -fno-sanitize-recover=all"
WATCHED = f"-g -O1 -fno-omit-frame-pointer {SMALL_PAGES} -fsanitize=address,{UNDEFINED}"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")
SECONDS = 1200
FLOAT32 = [variant for variant in build.VARIANTS if variant.precision == "float32" and build.can_run(variant)]
AMX = next(variant for variant in build.VARIANTS if variant.name == "amx")
EMULATED = f"-include {ROOT / 'tests' / 'helpers' / 'emulated_amx.h'}"
has_the_rest = {feature for feature in AMX.features if not feature.startswith("amx")} <= build.cpu_features()
VARIANTS = [*([AMX] if has_the_rest else []), *FLOAT32]
PARTS = ("acting", "training heads", "impala", "nature", "minibatch")

pytestmark = [pytest.mark.timeout(2 * SECONDS), pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
every_float32 = pytest.mark.parametrize("variant", FLOAT32, ids=lambda variant: variant.name)
needs_clang = pytest.mark.skipif(
    shutil.which("clang") is None, reason="needs clang (Debian: apt-get install clang libclang-rt-14-dev)"
)


def run_it(*call: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, call)], capture_output=True, text=True, timeout=SECONDS, check=False, **settings)


def without_random_addresses() -> list[str]:
    """Return what to put before a command: older sanitizers crash at times where addresses are very random."""
    with contextlib.suppress(OSError):
        if run_it("setarch", "-R", "true").returncode == 0:
            return ["setarch", "-R"]
    return []


def skip_without(compiler: str, flag: str, package: str) -> None:
    """Skip the test where this compiler has no such sanitizer."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.c"
        probe.write_text("int main(void) { return 0; }\n")
        if run_it(compiler, *flag.split(), probe, "-o", Path(folder) / "probe").returncode:
            pytest.skip(f"this {compiler} has no {flag} (Debian: {package})")


# While Python calls it


@functools.cache
def sanitizer() -> str:
    """Return the library that is to be loaded first; skip the test where gcc or Python does not work with it."""
    path = run_it("gcc", "-print-file-name=libasan.so").stdout.strip()
    skip_without("gcc", WATCHED, "libasan of the gcc at hand")
    if not os.path.isabs(path):
        pytest.skip("this gcc has no AddressSanitizer (Debian: libasan of the gcc at hand; Fedora: libasan)")
    call = [*without_random_addresses(), "env", f"LD_PRELOAD={path}", "ASAN_OPTIONS=detect_leaks=0"]
    started = run_it(*call, sys.executable, "-c", "")
    if started.returncode:
        pytest.skip(f"Python does not start with AddressSanitizer: {started.stderr[-300:]}")
    return path


def exercise(
    cache: Path, variant: build.Variant, *parts: str, watched: bool = True, package: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    env = environment() | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "CC": "gcc"}
    env |= {"RLCB_KERNELS": variant.name, "PYTHONPATH": str(package)}
    flags = ""
    if watched:  # Python leaks; NumPy and torch were not built to be watched
        env |= {"LD_PRELOAD": sanitizer(), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        flags = WATCHED
    if variant is AMX and (watched or not build.can_run(AMX)):
        flags, parts = f"{flags} {EMULATED}", (*parts, "emulated")
    env["RLCB_KERNEL_FLAGS"] = flags
    call = [*(without_random_addresses() if watched else []), sys.executable, str(HERE / "exercise.py"), *parts]
    return run_it(*call, cwd=package, env=env)


def assert_clean(done: subprocess.CompletedProcess[str], parts: Sequence[str]) -> None:
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.endswith(": clean")]
    assert lines == [f"{part}: clean" for part in parts]


def test_the_heads_are_clean(tmp_path):
    assert_clean(exercise(tmp_path, FLOAT32[-1], *PARTS[:2]), PARTS[:2])


@every_variant
def test_nothing_is_touched_beyond_its_end(variant, tmp_path):
    """Without a sanitizer: the very instructions that runs use, on guarded memory."""
    assert_clean(exercise(tmp_path, variant, "few", *PARTS[2:], watched=False), PARTS[2:])


@pytest.mark.long
@every_variant
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "as runs use it"])
def test_everything_is_clean(variant, watched, tmp_path):
    assert_clean(exercise(tmp_path, variant, *PARTS, watched=watched), PARTS)


def with_a_mistake(folder: Path, file: str, before: str, after: str) -> Path:
    """Copy the package and change a line of a source; return the folder that stands for build.FOLDER."""
    package = folder / "rl_cluster_benchmark"
    shutil.copytree(ROOT / "rl_cluster_benchmark", package, ignore=shutil.ignore_patterns("__pycache__", "built"))
    source = package / "kernels" / file
    text = source.read_text()
    assert before in text, f"{file} has changed; plant the mistake anew"
    source.write_text(text.replace(before, after, 1))
    return package / "kernels"


MISTAKES = [  # part, file, before, after, what is said
    ("acting", "heads.h", "j < heads->num_actions; j++)", "j <= heads->num_actions; j++)", "AddressSanitizer"),
    ("acting", "heads.h", "long action = 0;", "long action = heads->num_actions >> (heads->width + 100);", "shift exp"),
    ("impala", "impala.h", "if (!lines[place / 3] || (", "if ((", "SEGV|null pointer"),
    ("impala", "winograd.h", "smaller(TILES, tiles - first)", "TILES", "AddressSanitizer"),
    ("nature", "dense.h", "f < features; f += VL", "f <= features; f += VL", "AddressSanitizer"),
    ("nature", "nature.h", "(SIDE2 * SIDE2 * OUT2)", "(SIDE2 * SIDE2 * OUT2 - 1)", "AddressSanitizer"),
]


@pytest.mark.long
@pytest.mark.parametrize(("part", "file", "before", "after", "says"), MISTAKES, ids=lambda value: value[:20])
def test_a_planted_mistake_is_found(part, file, before, after, says, tmp_path):
    """With copies of the sources that read or write beyond an end, or shift too far."""
    with_a_mistake(tmp_path, f"source/{file}", before, after)
    done = exercise(tmp_path, FLOAT32[-1], "few", part, package=tmp_path)
    assert done.returncode != 0
    assert any(word in done.stderr for word in says.split("|")), done.stderr[-3000:]


# Memory that nobody has written, and threads


def program(folder: Path, compiler: str, variant: build.Variant, *flags: str, sources: Path = build.FOLDER) -> Path:
    made = folder / "memory"
    kind = ["-DAMX", *EMULATED.split()] if variant is AMX else [SMALL_PAGES]
    call = [compiler, "-g", "-O1", "-w", *build.FLAGS[3:], *variant.flags, *kind, *flags, f"-I{sources}"]
    done = run_it(*call, HERE / "memory.c", "-lm", "-o", made)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def assert_found(done: subprocess.CompletedProcess[str], words: str, is_planted: bool) -> None:
    assert (done.returncode != 0) == is_planted, done.stderr[-5000:]
    assert (words in done.stderr) == is_planted
    if not is_planted:
        assert done.stdout.splitlines() == ["heads: clean", "impala: clean", "nature: clean"]


planted_or_not = pytest.mark.parametrize("is_planted", [False, True], ids=["clean", "planted"])


def flag_of(is_planted: bool) -> list[str]:
    return ["-DPLANTED"] if is_planted else []


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind (Debian: apt-get install valgrind)")
@planted_or_not
def test_valgrind_finds_nothing(is_planted, tmp_path):
    known = next(variant for variant in FLOAT32 if variant.name != "avx512")
    made = program(tmp_path, "gcc", known, *flag_of(is_planted))
    assert_found(run_it("valgrind", "-q", "--error-exitcode=3", made), "uninitialised", is_planted)


@pytest.mark.long
@needs_clang
@every_variant
@planted_or_not
def test_memory_sanitizer_finds_nothing(variant, is_planted, tmp_path):
    skip_without("clang", "-fsanitize=memory", "libclang-rt-14-dev")
    made = program(tmp_path, "clang", variant, "-fsanitize=memory", *flag_of(is_planted))
    done = run_it(*without_random_addresses(), made)
    assert_found(done, "use-of-uninitialized-value", is_planted)


@pytest.mark.long
@every_float32
@planted_or_not
def test_thread_sanitizer_finds_nothing(variant, is_planted, tmp_path):
    """Four blocks of samples in three threads; the mistake gives all threads one memory."""
    skip_without("gcc", "-fsanitize=thread", "libtsan of the gcc at hand")
    sources = build.FOLDER
    if is_planted:
        sources = with_a_mistake(tmp_path, "source/network.h", "pass->net->works[count]", "pass->net->works[0]")
    made = program(tmp_path, "gcc", variant, "-fsanitize=thread", "-DSAMPLES=100", sources=sources)
    env = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    assert_found(run_it(*without_random_addresses(), made, env=env), "data race", is_planted)


# clang, whose warnings and sanitizers are others


@pytest.mark.long
@every_variant
@pytest.mark.parametrize("compiler", ["gcc", pytest.param("clang", marks=needs_clang)])
def test_compilers_have_nothing_to_say(compiler, variant, tmp_path):
    made = ["-o", tmp_path / "library.so", "-lm"]
    done = run_it(compiler, *WARNINGS, *build.FLAGS, *variant.flags, build.FOLDER / variant.source, *made)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@needs_clang
def test_clangs_undefined_behaviour_sanitizer_finds_nothing(tmp_path):
    """It sees more than that of gcc, such as places of a NULL pointer."""
    skip_without("clang", f"-fsanitize={UNDEFINED}", "libclang-rt-14-dev")
    made = program(tmp_path, "clang", FLOAT32[-1], *f"-fsanitize={UNDEFINED}".split())
    assert_found(run_it(made), "runtime error", is_planted=False)


@pytest.mark.long
@needs_clang
@every_float32
def test_what_clang_compiles_computes_what_torch_does(variant, tmp_path):
    code = (
        "from rl_cluster_benchmark.kernels import build, native_network;"
        "print(build.load().variant.name, *map(native_network.available, native_network.SOURCES))"
    )
    env = environment() | {"CC": "clang", "XDG_CACHE_HOME": str(tmp_path), "RLCB_KERNELS": variant.name}
    done = run_it(sys.executable, "-c", code, cwd=ROOT, env=env)
    assert done.stdout.split() == [variant.name, "True", "True"], done.stderr[-3000:]
