"""Asking a run to end, as terminals, shells and schedulers do it: real ones, with real signals."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from helpers.commands import CELL_SETTINGS, MATRIX, ROOT, TINY, environment
from helpers.forked import Command
from helpers.processes import RLCB, WORKERS, is_alive, num_updates, workers_of

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.core import stop
from rl_cluster_benchmark.execution.actor_learner import split
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.tools.tune.tuning import TuningSettings, tune

# Writes down the exit status of a command, whatever becomes of the terminal.
WITNESS = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
command = subprocess.Popen(sys.argv[2:], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
status = command.wait()
open(sys.argv[1], "w").write(str(status))
"""


class Terminal:
    """A bash on a terminal of its own: interactive, or running a script."""

    def __init__(self, *script):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve("/bin/bash", ["bash", *(script or ("--norc", "-i"))], environment() | {"PS1": "$ "})
        self.is_open, self._known = True, []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with contextlib.suppress(OSError):
            while self.is_open:
                if select.select([self.master], [], [], 0.05)[0]:
                    os.read(self.master, 65536)

    def type(self, line):
        os.write(self.master, f"{line}\n".encode())

    def vanish(self):
        """As when a window is closed: SIGHUP comes from the kernel, and from the shell or again from the kernel.

        That may be so soon that Python sees one signal only; hence once more.
        """
        everybody = self.everybody()
        self.is_open = False
        self.reader.join()
        os.close(self.master)
        time.sleep(0.03)
        for process in everybody:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGHUP)
        os.waitpid(self.pid, 0)

    def everybody(self):
        """All processes that were started here, so far as they have been asked for."""
        with contextlib.suppress(psutil.Error):
            shell = psutil.Process(self.pid)
            self._known += [shell, *shell.children(recursive=True)]
        return list(filter(is_alive, self._known))


@pytest.fixture
def open_terminal(needs_pty):
    terminals = []

    def open_one(*script):
        terminals.append(Terminal(*script))
        return terminals[-1]

    yield open_one
    for terminal in terminals:
        terminal.is_open = False
        for process in terminal.everybody():
            with contextlib.suppress(psutil.Error):
                process.kill()


def words(*parts):
    return " ".join(f"'{part}'" for part in parts)


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_summary(output):
    return json.loads((output / "training_summary.json").read_text())


def test_closing_the_terminal_ends_a_run_in_good_order(open_terminal, tmp_path):
    """Bug 1: SIGHUP comes twice, and what the run prints from then on cannot be written."""
    output, status = tmp_path / "run", tmp_path / "status"
    train = (*RLCB, "train", *TINY, *WORKERS, "--total-timesteps", 10**8, "--output-dir", output)
    script = tmp_path / "train.sh"
    script.write_text(f"{words(sys.executable, '-c', WITNESS, status, *train)}\necho done\n")
    terminal = open_terminal(script)
    wait_for(lambda: num_updates(output) > 5)
    terminal.vanish()
    wait_for(lambda: status.exists() and status.read_text(), 60)
    assert int(status.read_text()) == 128 + signal.SIGHUP
    summary = read_summary(output)
    assert summary["state"] == "interrupted"
    assert summary["reason"] == f"signal {int(signal.SIGHUP)}"
    newest = max((output / "checkpoints").glob("*_step_*.pt"), key=lambda file: int(file.stem.rpartition("_")[2]))
    assert checkpoint.load(newest)["progress"]["steps"] == summary["total_timesteps"]
    assert json.loads((output / "metrics.json").read_text())["step"][-1] == summary["total_timesteps"]
    wait_for(lambda: not terminal.everybody(), 30)


def test_a_second_order_ends_at_once(tmp_path):
    """Bug 1: when it comes a second later, and is not SIGHUP; here a worker that is stopped holds up the good order."""
    output = tmp_path / "run"
    call = ("train", *TINY, *WORKERS, "--total-timesteps", 10**8, "--output-dir", output)
    with open(tmp_path / "text", "wb") as text:
        process = Command(call, cwd=ROOT, env=environment(), stdout=text, stderr=text)
    try:
        wait_for(lambda: num_updates(output) > 1)
        workers = workers_of(process)
        workers[0].suspend()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 128 + signal.SIGINT
        wait_for(lambda: not any(map(is_alive, workers)), 30)
    finally:
        process.kill()


SECONDS = ("--total-timesteps", 10**8, "--duration", 3 / 3600)
LAUNCH = ("launch", "local", "--nodes", 2, "--", "train", *TINY, "--workers-per-node", 1, "--set", "parallel.pin=never")


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (("train", *TINY, *WORKERS, *SECONDS, "--output-dir"), "PPO_Parallel"),
        pytest.param((*LAUNCH, *SECONDS, "--output-dir"), "PPO_Distributed", marks=pytest.mark.long),
    ],
    ids=("train", "launch"),
)
def test_nohup(command, label, open_terminal, tmp_path):
    """Bug 2: what is started with nohup survives its terminal."""
    output = tmp_path / "run"
    terminal = open_terminal()
    terminal.type(f"nohup {words(*RLCB, *command, output)} > {tmp_path}/nohup.out 2>&1 &")
    wait_for(lambda: num_updates(output, label) > 1)
    assert not (output / "training_summary.json").exists(), "it ended too early for this test"
    terminal.vanish()
    wait_for(lambda: (output / "training_summary.json").exists())
    assert read_summary(output)["state"] == "finished"


@pytest.mark.long
def test_nohup_of_a_benchmark(open_terminal, tmp_path):
    """Bug 2, with processes of its own that have sessions of their own."""
    output = tmp_path / "matrix"
    terminal = open_terminal()
    benchmark = words(*RLCB, "benchmark", *MATRIX, *CELL_SETTINGS, "--output-dir", output)
    terminal.type(f"nohup {benchmark} > {tmp_path}/nohup.out 2>&1 &")
    wait_for(lambda: any(output.glob("cells/*/config.yaml")))
    terminal.vanish()
    wait_for(lambda: len(list(output.glob("cells/*/evaluation_all.json"))) == 4, 240)


def test_ctrl_c_does_not_reach_a_job_in_the_background(tmp_path):
    """Bug 2: a script's `command &` has SIGINT ignored, as Ctrl-C is meant for what runs in front. SIGTERM ends it."""
    output = tmp_path / "run"
    train = words(*RLCB, "train", *TINY, "--total-timesteps", 10**8, "--output-dir", output)
    script = f"{train} > {tmp_path}/text 2>&1 & echo $!; wait $!; echo $?"
    call = ["/bin/sh", "-c", script]
    shell = subprocess.Popen(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    try:
        wait_for(lambda: num_updates(output, "PPO_Sequential") > 1)
        os.kill(pid, signal.SIGINT)
        before = num_updates(output, "PPO_Sequential")
        wait_for(lambda: num_updates(output, "PPO_Sequential") > before + 5)
        os.kill(pid, signal.SIGTERM)
        assert int(shell.communicate(timeout=60)[0]) == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert read_summary(output)["reason"] == f"signal {int(signal.SIGTERM)}"


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("impala", marks=pytest.mark.long)])
def test_sigterm_while_many_workers_start(algorithm, tmp_path):
    """Bug 19: it is obeyed at once, not when all have started; and nothing of an older run is gone."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "config.yaml").write_text("of an older run")
    (output / ".lock").write_text("here 1 0")  # its last owner
    args = (
        "--algorithm",
        algorithm,
        "--env",
        "Catch-v0",
        "--num-threads",
        1,
        "--batch-size",
        128,
        "--set",
        "training.n_steps=32",
    )
    args += ("--mode", "parallel", "--num-workers", 48, "--num-envs-per-worker", 2, "--overwrite")
    call = [*RLCB, "train", *map(str, args), "--output-dir", str(output)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(call, cwd=ROOT, env=environment(), text=True, **pipes)
    parent = psutil.Process(process.pid)
    everybody = []

    def several_have_started():
        nonlocal everybody
        everybody = parent.children(recursive=True)
        return len(everybody) > 8 or process.poll() is not None

    try:
        wait_for(several_have_started)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            assert time.monotonic() - began < 40
            with contextlib.suppress(psutil.Error):
                assert len(parent.children(recursive=True)) < 48, "it goes on starting workers"
            time.sleep(0.05)
        text, _ = process.communicate()
        assert process.returncode == 128 + signal.SIGTERM, text
        assert "Stopped before training began" in text
    finally:
        process.kill()
    assert (output / "config.yaml").read_text() == "of an older run"
    wait_for(lambda: not any(map(is_alive, everybody)), 30)


class Ended(Exception):  # noqa: N818
    """What stands for os._exit below."""


@pytest.fixture
def told(monkeypatch):
    """Return (signals, a function): it says that a signal came at that second, and returns the status it ended with."""
    signals = stop.Signals()

    def end(status):
        raise Ended(status)

    def tell(number, at):
        monkeypatch.setattr(stop.time, "monotonic", lambda: 1000.0 + at)
        try:
            signals._handle(number, None)
        except Ended as end:
            return end.args[0]

    monkeypatch.setattr(stop.os, "_exit", end)
    return signals, tell


def test_a_first_order_after_one_to_another_machine_is_no_second_one(told, capfd):
    signals, tell = told
    signals.receive(signal.SIGTERM)  # by another machine, as Cluster.take_signal says
    assert tell(signal.SIGINT, 60) is None
    assert "SIGINT: finishing and saving" in capfd.readouterr().err
    assert tell(signal.SIGINT, 60.5) is None, "the same order again"
    assert tell(signal.SIGINT, 61.5) == 128 + signal.SIGINT
    assert signals.received == signal.SIGTERM


def test_a_first_order_after_a_closed_terminal_is_no_second_one(told):
    signals, tell = told
    assert tell(signal.SIGHUP, 0) is None
    assert tell(signal.SIGTERM, 5) is None, "from the session that ends with the terminal"
    assert tell(signal.SIGHUP, 50) is None
    assert tell(signal.SIGTERM, 6.5) == 128 + signal.SIGTERM
    assert signals.received == signal.SIGHUP


BEGINNING = """
import signal, sys, time
from rl_cluster_benchmark.processes import pool as workers
from rl_cluster_benchmark.core.stop import Signals
signals = Signals()
signals.install()
workers.start_server(None)
print("started", flush=True)
while not workers._server_is_ready():
    time.sleep(0.05)
server = workers.forkserver._forkserver._forkserver_pid
print(signals.received, open(f"/proc/{server}/stat").read().split()[2], flush=True)
"""


def test_ctrl_c_while_the_server_of_workers_starts():
    """It comes to all processes of a terminal, and to that one before it can say that it ignores it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    call = [sys.executable, "-c", BEGINNING]
    process = subprocess.Popen(call, cwd=ROOT, env=environment(), text=True, start_new_session=True, **pipes)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        text, errors = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in errors
    assert text.split()[0] == str(int(signal.SIGINT))
    assert text.split()[1] in "SR", "it lives"


def test_a_search_that_is_stopped_while_it_measures_the_split(tmp_path, capsys, monkeypatch):
    def measure(config, look):
        signals.receive(signal.SIGTERM)
        look()

    signals = stop.Signals()
    monkeypatch.setattr(split, "fill_in", measure)
    config = config_files.build({"algorithm": "impala", "mode": "parallel"}, {"env.name": "Catch-v0"}, source="a test")
    assert tune(config, TuningSettings(60, 1, tmp_path / "tuned", False), signals) == 128 + signal.SIGTERM
    assert capsys.readouterr().out == "Interrupted before anything was measured: no file is written.\n"
    assert not (tmp_path / "tuned").exists()
