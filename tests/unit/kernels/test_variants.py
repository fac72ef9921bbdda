"""Every variant of the library against plain loops (plain_loops.c): those of other CPUs in an emulator."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_cluster_benchmark.kernels import build

HERE = Path(__file__).parent
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
INSTALL = "Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
SECONDS = 600
SOURCE = build.FOLDER / "source"
VARIANTS = [variant for variant in build.VARIANTS if variant.precision == "float32"]  # test_amx.py has the other
ERRORS = r"(impala|nature): features differ by \S+ to \S+, gradients by \S+ to \S+"
pytestmark = pytest.mark.timeout(2 * SECONDS)


def tools(variant: build.Variant) -> tuple[list[str], list[str]]:
    """Return the compiler and what runs its programs; skip the test where they are missing."""
    if build.can_run(variant):
        compiler = build.compiler()
        if compiler is None:
            pytest.skip("needs a C compiler")
        return [compiler], []
    if variant.machines == build.ARM:
        for tool in (CROSS, EMULATOR):
            if shutil.which(tool) is None:
                pytest.skip(f"needs {tool} ({INSTALL}): the variant {variant.name} was NOT tested")
        return [CROSS, "-static"], [EMULATOR]
    lacks = ", ".join(sorted(variant.features - build.cpu_features())) or f"an {variant.machines[0]} CPU"
    pytest.skip(f"needs {lacks}: the variant {variant.name} was NOT tested")


def compare(
    folder: Path, variant: build.Variant, sources: Path = SOURCE, optimise: str = build.FLAGS[0]
) -> subprocess.CompletedProcess[str]:
    compiler, runner = tools(variant)
    made = folder / "plain_loops"
    flags = [optimise, *build.FLAGS[3:], *variant.flags, f"-I{sources}"]
    words = [*compiler, *flags, str(HERE / "plain_loops.c"), "-lm", "-o", str(made)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return subprocess.run([*runner, str(made)], capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_equals_plain_loops(variant, tmp_path):
    done = compare(tmp_path, variant)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(ERRORS, done.stdout) == ["impala", "impala", "nature"]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("winograd.h", "y[2] = s + 4 * s4", "y[2] = s + 3.99f * s4"),
        ("impala.h", "j < 4 ? value >= best : value > best", "value < best"),
        ("nature.h", "y = 2 * (p / SIDE2) + k / run", "y = 2 * (p / SIDE2)"),
        ("network.h", "gradient.bias[c] += pass->slopes", "gradient.bias[c] = pass->slopes"),
    ],
    ids=lambda value: value[:12],
)
def test_a_planted_mistake_is_found(file, before, after, tmp_path):
    sources = tmp_path / "source"
    shutil.copytree(SOURCE, sources)
    text = (sources / file).read_text()
    assert before in text, f"{file} has changed; plant the mistake anew"
    (sources / file).write_text(text.replace(before, after, 1))
    done = compare(tmp_path, VARIANTS[-1], sources, "-O1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(ERRORS, done.stdout)


def test_a_cpu_is_never_given_what_it_lacks(monkeypatch):
    """Not even where the library is there: an instruction that the CPU has not ends the process."""
    tried = []
    monkeypatch.setattr(build, "_built", lambda variant: tried.append(variant.name))
    monkeypatch.setattr(build, "_compiled_here", lambda variant: None)
    monkeypatch.delenv("RLCB_KERNELS", raising=False)
    monkeypatch.delenv("RLCB_NO_KERNELS", raising=False)
    everything = frozenset().union(*(variant.features for variant in build.VARIANTS))
    for machine in ("x86_64", "aarch64", "riscv64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        for lacking in (*sorted(everything), None):
            features = frozenset() if lacking is None else everything - {lacking}
            monkeypatch.setattr(build, "cpu_features", lambda features=features: features)
            tried.clear()
            assert build.load.__wrapped__("bfloat16") is build.load.__wrapped__("float32") is None
            for variant in build.VARIANTS:
                suits = variant.features <= features and (not variant.machines or machine in variant.machines)
                assert (variant.name in tried) == suits, (machine, lacking)
            assert tried[-1] == "plain"
