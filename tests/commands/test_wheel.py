"""Wheels carry the C code, compiled for every kind of CPU of their platform; and which of it a CPU is given."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.commands import ROOT, rlcb

from rl_cluster_benchmark.kernels import build

OWN = ("CC", "PYTHONPATH", "RLCB_KERNELS", "RLCB_NO_KERNELS", "RLCB_KERNEL_FLAGS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OWN}
VARIANTS = [variant for variant in build.VARIANTS if not variant.machines or platform.machine() in variant.machines]
PARTS = ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "LICENSE", "config", "rl_cluster_benchmark")
SECONDS = 900
# Stands in for a compiler: writes something where that is asked for.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def source(tmp_path):
    """Return a copy of what wheels are made from: the code is compiled in place."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "built"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def compiler(tmp_path):
    path = tmp_path / "cc"
    path.write_text(COMPILER)
    path.chmod(0o755)
    return path


def made(source: Path, target: str, **variables: str) -> tuple[Path, str]:
    """Build a target, as pip would; return the file and what was said."""
    call = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(source / "dist")]
    env = ENVIRONMENT | variables
    done = subprocess.run(call, cwd=source, env=env, capture_output=True, text=True, timeout=SECONDS, check=True)
    (file,) = (source / "dist").iterdir()
    return file, done.stdout + done.stderr


def compiled_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as file:
        return sorted(name for name in file.namelist() if "/built/" in name)


def names(variants: list[build.Variant], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("RLCB_KERNEL_FLAGS", raising=False)
    return sorted(f"rl_cluster_benchmark/kernels/built/{build.file_name(variant)}" for variant in variants)


def test_a_wheel_has_every_variant_of_its_platform(source, compiler, monkeypatch):
    wheel, _ = made(source, "wheel", CC=str(compiler), RLCB_KERNEL_FLAGS="-O0")
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    assert compiled_in(wheel) == names(VARIANTS, monkeypatch)


def test_a_wheel_without_a_compiler_is_for_all_platforms_and_says_so(source):
    wheel, said = made(source, "wheel", CC="/nowhere/cc")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert compiled_in(wheel) == []
    assert "No C compiler" in said


def test_what_the_compiler_cannot_do_is_left_out(source, compiler, monkeypatch):
    compiler.write_text(COMPILER.replace("while", 'case "$*" in *-DVL=4*) ;; *) exit 1 ;; esac\nwhile', 1))
    wheel, _ = made(source, "wheel", CC=str(compiler))
    assert compiled_in(wheel) == names([v for v in VARIANTS if "-DVL=4" in v.flags], monkeypatch)


def test_compiled_code_is_not_in_the_source_distribution(source, compiler):
    (source / "rl_cluster_benchmark" / "kernels" / "built").mkdir()
    (source / "rl_cluster_benchmark" / "kernels" / "built" / "network-old.so").write_text("of an older wheel")
    archive, _ = made(source, "sdist", CC=str(compiler))
    listed = subprocess.run(["tar", "tzf", str(archive)], capture_output=True, text=True, check=True).stdout
    assert "kernels/source/network.c" in listed
    assert "hatch_build.py" in listed
    assert "built" not in listed


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.skipif(build.compiler() is None, reason="needs a C compiler")
def test_an_installed_wheel_needs_no_compiler(source, tmp_path):
    """In an environment of its own, which has the packages of this one, and no program that could compile."""
    wheel, _ = made(source, "wheel")
    shutil.rmtree(source / "rl_cluster_benchmark")
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=SECONDS)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")

    def run(*args: object, **variables: str) -> subprocess.CompletedProcess[str]:
        env = ENVIRONMENT | {"PATH": str(python.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")} | variables
        call = [str(python.with_name("rlcb")), *map(str, args)]
        return subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)

    def train(name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        few = ("--num-envs", 4, "--batch-size", 64, "--total-timesteps", 128, "--set", "training.n_steps=32")
        return run("train", "--env", "coinrun", *few, "--output-dir", tmp_path / name, **variables)

    can_run = [variant.name for variant in VARIANTS if build.can_run(variant)]
    doctor = run("doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert f"C kernels              ok       {can_run[0]}: checked against torch" in doctor.stdout
    for variables, variant in [({}, can_run[0]), *(({"RLCB_KERNELS": name}, name) for name in can_run[1:])]:
        done = train(f"run-{variant}", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Network: native ({variant})" in done.stdout
    assert not (tmp_path / "cache").exists(), "nothing was compiled"
    cannot_run = next(variant.name for variant in build.VARIANTS if not build.can_run(variant))
    for name in ("nonsense", cannot_run):
        refused = train("refused", RLCB_KERNELS=name)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: RLCB_KERNELS = {name}")


# Names of variants that there are not, or not here


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_a_variant_that_is_not_there_is_refused_in_one_sentence(mode, tmp_path):
    few = ("--env", "coinrun", "--mode", mode, "--num-envs", 4, "--total-timesteps", 128, "--output-dir", tmp_path)
    done = rlcb("train", *few, variables={"RLCB_KERNELS": "nonsense"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "error: RLCB_KERNELS = nonsense: there is no such variant, only amx, avx512, avx2, neon"
    )


def test_a_variant_that_cannot_be_compiled_is_not_replaced_in_silence(tmp_path):
    variables = {"RLCB_KERNELS": "plain", "CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = rlcb("train", "--env", "coinrun", "--num-envs", 4, "--output-dir", tmp_path, variables=variables)
    assert done.returncode == 2
    assert done.stderr == f"error: RLCB_KERNELS = plain {build.NOT_HERE}\n"


def test_the_doctor_says_what_is_wrong_with_the_variant(call, monkeypatch):
    monkeypatch.setenv("RLCB_KERNELS", "nonsense")
    build.load.cache_clear()
    status, out, _ = call("doctor")
    build.load.cache_clear()
    assert status == 1
    assert "C kernels              PROBLEM  RLCB_KERNELS = nonsense: there is no such variant" in out
