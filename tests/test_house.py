"""How the package is arranged: folders that import in one direction, and names that stand for one thing each."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.commands import ROOT, TINY

PACKAGE = ROOT / "rl_cluster_benchmark"
MOST_MODULES = 12  # in a folder
SOURCES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")


def repeated(names):
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_folder_is_crowded():
    assert {
        folder for folder, count in Counter(file.parent for file in SOURCES).items() if count > MOST_MODULES
    } == set()


def test_no_module_and_no_class_has_the_name_of_another():
    assert repeated(file.name for file in SOURCES) == set()
    classes = [node.name for file in SOURCES for node in ast.walk(ast.parse(file.read_text()))
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert repeated(classes) == set()


def test_no_name_of_an_algorithm_or_a_mode_is_compared_with():
    """What differs between algorithms and between modes are traits (config/traits.py); an architecture is neither."""
    names = {"ppo", "a2c", "a3c", "impala", "PPO", "A2C", "A3C", "IMPALA", "sequential", "parallel", "distributed"}
    found = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())) if file.parent.name != "config" else ():
            if isinstance(node, ast.Compare) and "architecture" not in ast.unparse(node):
                operands = [node.left, *node.comparators]
                operands += [part for operand in operands for part in getattr(operand, "elts", ())]
                if any(isinstance(operand, ast.Constant) and operand.value in names for operand in operands):
                    found.append(f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("core/seeding.py", "    from rl_cluster_benchmark.config.schema import Config\n"),
        ("execution/hogwild/hogwild.py", "    from rl_cluster_benchmark.execution.in_step import data_parallel\n"),
        ("run/metrics.py", "    from rl_cluster_benchmark.run import run\n"),
        (
            "processes/claims.py",
            "    if TYPE_CHECKING:\n        from rl_cluster_benchmark.cluster import store\n",
        ),
    ],
)
def test_an_import_that_goes_upwards_or_in_a_circle_fails_the_lint(tmp_path, file, line):
    """The lint itself runs in `make lint`; here it gets something to find."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with open(tmp_path / PACKAGE.name / file, "a") as source:
        source.write(f"\n\ndef _planted():\n{line}")
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "BROKEN" in done.stdout


@pytest.mark.parametrize("page", ["architecture.md", "mechanisms.md"])
def test_the_modules_that_the_docs_name_are_there(page):
    named = re.findall(r"`([a-z_/]+/[a-z_]+\.(?:py|c|h))`", (ROOT / "docs" / page).read_text())
    assert len(named) > 10
    assert [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()] == []


# The way of an observation: tests/helpers/traced says what counts as a module on it.
TRACED = (*TINY, "--total-timesteps", 1024, "--set", "training.save_interval=1")
SHARED_WORK = ("--set", "parallel.balance=0.5")
WAYS = {  # mode: the most modules, the command
    "sequential": (14, ("train", *TRACED)),
    "parallel": (20, ("train", *TRACED, *SHARED_WORK, "--mode", "parallel", "--num-workers", 2)),
    "IMPALA": (22, ("train", *TRACED, "--total-timesteps", 8192, "--mode", "parallel", "--algorithm", "impala",
                    "--num-workers", 1)),
    "distributed": (24, ("launch", "local", "--nodes", 2, "--", "train", *TRACED, "--num-workers", 2,
                         *SHARED_WORK)),
}  # fmt: skip
MOST_CALLS = 7  # from cli.main to the optimiser's step in one process


@pytest.mark.parametrize("mode", WAYS)
def test_an_observation_passes_few_modules(mode, tmp_path):
    most, command = WAYS[mode]
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "stage").write_bytes(b"\0")
    path = f"{Path(__file__).parent / 'helpers' / 'traced'}:{ROOT}"
    call = [sys.executable, "-m", PACKAGE.name, *map(str, command), "--output-dir", str(tmp_path / "run")]
    variables = os.environ | {"PYTHONPATH": path, "RLCB_TRACE": str(traces)}
    done = subprocess.run(call, env=variables, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    seen = {line for file in traces.glob("*.seen") for line in file.read_text().splitlines()}
    modules = sorted(line.removeprefix("module ") for line in seen if line.startswith("module "))
    assert 10 < len(modules) <= most, "\n".join(modules)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [module for module in modules if module not in page] == [], "docs/architecture.md shows the way"
    if mode == "sequential":
        (calls,) = (line.split() for line in seen if line.startswith("calls "))
        _, *called = calls[calls.index("cli/main.py:main") :]
        assert len(called) <= MOST_CALLS, called
