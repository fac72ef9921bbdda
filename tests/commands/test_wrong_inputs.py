"""Every command, given each of thirty wrong inputs: one clear sentence, status 1 or 2, never a traceback."""

from __future__ import annotations

import os
import signal

import pytest

from rl_cluster_benchmark.cli.main import main

# Files that a test makes are named in angle brackets.
WRONG = [
    "", " ", "no such thing", "nowhere/at/all.pt", "x" * 5000, "\0", "a\0b", "two\nlines", "caf\u00e9\udcff", "-", "-1",
    "0", "3.5", "nan", "inf", "1e999", "9" * 400, "0x10", "true", "null", "[]", "{", "a=b", "*", "$(touch pwned)",
    "/proc/self/mem", "<directory>", "<garbage>", "<text>", "<yaml bomb>",
]  # fmt: skip

# Where the input goes, and what would be right there. Nothing may run that takes longer than to read it.
COMMANDS = {
    "train --algorithm": (("train", "--algorithm", "X"), ()),
    "train --config": (("train", "--config", "X"), ()),
    "train --env": (("train", "--env", "X"), ()),
    "train --num-envs": (("train", "--num-envs", "X"), ()),
    "train --set": (("train", "--set", "X"), ()),
    "train --set value": (("train", "--set", "training.n_steps=X"), ("0x10",)),
    "config": (("config", "--config", "X"), ()),
    "config --mode": (("config", "--mode", "X"), ()),
    "evaluate": (("evaluate", "--checkpoint", "X"), ()),
    "evaluate --levels": (("evaluate", "--levels", "X"), ()),
    "evaluate --seed": (("evaluate", "--checkpoint", "none.pt", "--seed", "X"), ()),
    "plot": (("plot", "--log-file", "X"), ()),
    "scaling": (("scaling", "--workers", "X"), ()),
    "runs": (("runs", "X"), ()),
    "compare": (("compare", "X"), ()),
    "compare two": (("compare", "--sequential", "X", "--parallel", "X"), ()),
    "report": (("report", "X"), ()),
    "benchmark": (("benchmark", "--plan", "--duration", "0.1", "--algorithms", "X"), ()),
    "benchmark --duration": (("benchmark", "--plan", "--duration", "X"), ("3.5",)),
    "benchmark --configs": (("benchmark", "--plan", "--duration", "0.1", "--configs", "X"), ()),
    "dashboard": (("dashboard", "X"), ("<directory>",)),
    "dashboard --port": (("dashboard", "nowhere", "--port", "X"), ()),
    "doctor": (("doctor", "X"), ()),
    "quickstart": (("quickstart", "--duration", "X"), ("3.5",)),
    "launch": (("launch", "X"), ()),
    "launch local": (("launch", "local", "--nodes", "X", "--", "train"), ("9" * 400,)),
    "launch ssh": (("launch", "ssh", "--hosts", "a,b", "--", "train", "--set", "X"), ()),
    "launch slurm": (("launch", "slurm", "--nodes", "2", "--time", "X", "--dry-run", "--", "train"), ("0", "9" * 400)),
    "launch pbs": (("launch", "pbs", "--nodes", "X", "--dry-run", "--", "train"), ("9" * 400,)),
    "launch ray": (("launch", "ray", "--nodes", "X", "--", "train"), ("9" * 400,)),
    "checkpoint": (("checkpoint", "X", "file.pt"), ()),
    "checkpoint inspect": (("checkpoint", "inspect", "X"), ()),
    "checkpoint verify": (("checkpoint", "verify", "X"), ()),
}


def test_there_are_thirty():
    assert len(set(WRONG)) == 30


@pytest.fixture
def files(tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "garbage").write_bytes(os.urandom(3000))
    (tmp_path / "text").write_text("what is this?\n")
    layers = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12))
    (tmp_path / "yaml bomb").write_text(f"a0: &a0 [x]\n{layers}")
    return {f"<{path.name}>": str(path) for path in tmp_path.iterdir()}


@pytest.fixture
def as_before(tmp_path, monkeypatch):
    """Commands run in this process: what they set for theirs is taken back."""
    monkeypatch.chdir(tmp_path / "directory" if (tmp_path / "directory").exists() else tmp_path)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def answer(arguments, capsys):
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    return status, capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_inputs(command, files, as_before, capsys):
    template, right = COMMANDS[command]
    for wrong in WRONG:
        if wrong in right:
            continue
        value = files.get(wrong, wrong)
        arguments = [part.replace("X", value) if part.endswith("X") else part for part in template]
        status, said = answer(arguments, capsys)
        told = f"rlcb {arguments}: status {status}\n{said.err}\n{said.out}"
        assert status not in (0, None), told
        assert status in (1, 2), told
        assert "Traceback" not in said.err + said.out, told
        sentences = [line for line in (said.err or said.out).splitlines() if line.strip() and line[0] != " "]
        about = [line for line in sentences if not line.startswith("usage:")]
        assert about, told
        assert len(about[-1]) < 6000 + len(value), told
        assert len(about) <= 4, told
    assert not os.path.exists("pwned")
