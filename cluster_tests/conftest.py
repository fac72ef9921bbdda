"""Real engines on this machine: `make test-cluster` installs them, a test says which one it misses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from hosts import Hosts, missing
from rl_cluster_benchmark.core.stop import ORDERS

for number in ORDERS:  # under nohup: ignored here as before, but not by the runs that tests start
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
ROOT = Path(__file__).parent.parent
TINY = (
    "--env", "Catch-v0", "--set", "training.n_steps=32", "--set", "parallel.pin=never", "--num-envs", "24",
    "--batch-size", "192", "--num-threads", "1", "--workers-per-node", "1", "--set", "cluster.timeout=6",
    "--set", "logging.tensorboard=false", "--set", "training.save_interval=5",
)  # fmt: skip
FOREVER = "100000000"
RLCB = (sys.executable, "-m", "rl_cluster_benchmark")


def need(*programs: str) -> None:
    absent = [
        program for program in programs if shutil.which(program) is None and not Path("/usr/sbin", program).exists()
    ]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)} (make test-cluster installs it where it may)")


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | more


class Processes:
    """Started by a test, ended with it, and everything they started as well."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(self, call, log: Path, **environ: str) -> subprocess.Popen[str]:
        with log.open("w") as file:
            process = subprocess.Popen(
                list(map(str, call)), cwd=ROOT, env=environment(**environ), stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            family = []
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            process.wait()


@pytest.fixture
def processes():
    started = Processes()
    yield started
    started.end()


@pytest.fixture
def hosts():
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    made = Hosts(4)
    yield made
    made.close()


@pytest.fixture
def sshd(hosts, processes, tmp_path):
    """A server on every host, and the options with which a client on h0 gets in; no user's keys are touched."""
    config, options = ssh_settings(tmp_path)
    for index in (1, 2, 3):
        processes.start(hosts.call(index, ["/usr/sbin/sshd", "-D", "-f", config]), tmp_path / f"sshd{index}.log")
    return options


def finished(process: subprocess.Popen[str], seconds: float, log: Path) -> int:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()) from None


def updates(output: Path, label: str = "PPO_Distributed") -> int:
    log = output / "logs" / label / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def wait_until(condition, seconds: float, what: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s\n{log.read_text() if log else ''}")
        time.sleep(0.1)


def check_run(output: Path, *, nodes: int, state: str = "finished", label: str = "PPO_Distributed") -> dict:
    """One correct run directory: whole, continuous, written by one head."""
    summary = json.loads((output / "training_summary.json").read_text())
    assert summary["state"] == state, summary
    assert len(summary["nodes"]) == nodes, summary["nodes"]
    lines = [json.loads(line) for line in (output / "logs" / label / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, summary["total_updates"] + 1))
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == summary["total_timesteps"]
    assert not list(output.rglob("*.tmp"))
    return summary


def ssh_settings(directory: Path, **server: object) -> tuple[Path, list[str]]:
    """(config of a server, options of a client that gets into it); no user's keys or settings are touched."""
    need("sshd", "ssh", "ssh-keygen")
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    shutil.copy(directory / "key.pub", directory / "authorized_keys")
    settings = {
        "HostKey": directory / "host_key", "AuthorizedKeysFile": directory / "authorized_keys", "StrictModes": "no",
        "UsePAM": "no", "PidFile": "none", "PasswordAuthentication": "no",
    }  # fmt: skip
    config = directory / "sshd_config"
    config.write_text("".join(f"{key} {value}\n" for key, value in (settings | server).items()))
    os.makedirs("/run/sshd", exist_ok=True)
    options = {
        "IdentityFile": directory / "key", "StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null",
        "IdentitiesOnly": "yes",
    }  # fmt: skip
    return config, [f"{key}={value}" for key, value in options.items()]
