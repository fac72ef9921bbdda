"""Shared by the tests: running commands as a person would, and a scripted environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from forked import Command
from torch import Tensor

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.stop import ORDERS
from rl_cluster_benchmark.env.environments import Step
from rl_cluster_benchmark.experience.returns import gae
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.kernels import native_network
from rl_cluster_benchmark.run import checkpoint

ROOT = Path(__file__).parent.parent
for number in ORDERS:  # under nohup, or in the background: ignored here as before, but not by the runs that tests start
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
needs_native = pytest.mark.skipif(not native_network.available("impala"), reason="needs AVX512-BF16 and a C compiler")


def rlcb(
    *args: object, cwd: Path | None = None, timeout: float = 240, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `rlcb` in its own process, with these variables added to its environment."""
    env = environment() | dict(variables or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Command(args, cwd=cwd or ROOT, env=env, text=True, **pipes) as command:
        try:
            output, errors = command.communicate(timeout=timeout)
        except BaseException:
            command.kill()
            raise
    return subprocess.CompletedProcess(command.args, command.returncode, output, errors)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


# A run that takes a second: 16 environments of a toy game, updates of 512 steps.
TINY = (
    "--env", "Catch-v0", "--num-envs", 16, "--batch-size", 128, "--set", "training.n_steps=32",
    "--num-threads", 1,
)  # fmt: skip


def tiny_run(output: Path, *args: object, timesteps: int = 4000) -> subprocess.CompletedProcess[str]:
    return rlcb("train", *TINY, "--total-timesteps", timesteps, "--output-dir", output, *args)


def read_metrics(output: Path, label: str = "PPO_Sequential") -> list[dict[str, Any]]:
    lines = (output / "logs" / label / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def started_with(output: Path, key: str, value: object) -> None:
    """Make a run one that was started with another setting, which --resume would refuse to change."""
    file = output / "config.yaml"
    file.write_text(configs.to_yaml(configs.load(file, {key: value})))
    section, _, name = key.partition(".")
    for path in (output / "checkpoints").glob("*.pt"):
        state = checkpoint.load(path)
        state["config"][section][name] = value
        checkpoint.save(path, state)


class ScriptedEnv:
    """Environments that play fixed episodes, one after the other, with EnvPool's reset on the next step.

    An episode is a list of rewards and how it ends: "terminated" or "truncated". An observation is
    [environment, episode, step]; the true last frame of an episode has step = its length.
    """

    num_actions = 3
    observation_shape = (3,)
    observation_dtype = np.dtype(np.float32)

    def __init__(self, scripts: list[list[tuple[list[float], str]]]) -> None:
        self.scripts = scripts
        self.num_envs = len(scripts)
        self.episode = [0] * self.num_envs
        self.time = [0] * self.num_envs
        self.ended = [False] * self.num_envs

    def reset(self) -> np.ndarray:
        return self._observations()

    def step(self, actions: np.ndarray) -> Step:
        rewards, terminated, truncated = (np.zeros(self.num_envs, dtype) for dtype in (np.float32, bool, bool))
        for i, script in enumerate(self.scripts):
            if self.ended[i]:  # the action is ignored; this is the reset
                self.episode[i], self.time[i], self.ended[i] = self.episode[i] + 1, 0, False
                continue
            episode_rewards, how = script[self.episode[i] % len(script)]
            rewards[i] = episode_rewards[self.time[i]]
            self.time[i] += 1
            if self.time[i] == len(episode_rewards):
                self.ended[i] = True
                terminated[i], truncated[i] = how == "terminated", how == "truncated"
        return Step(self._observations(), rewards, terminated, truncated)

    def _observations(self) -> np.ndarray:
        return np.array([[i, self.episode[i], self.time[i]] for i in range(self.num_envs)], dtype=np.float32)


def targets(rollout: Rollout, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of a rollout with raw rewards."""
    return gae(
        rewards=rollout.rewards,
        values=rollout.values,
        last_values=rollout.last_values,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


@pytest.fixture
def needs_pty() -> None:
    """Skip a test where no pseudo terminal can be opened."""
    try:
        ends = os.openpty()
    except OSError as error:
        pytest.skip(f"needs a pseudo terminal: {error}")
    for end in ends:
        os.close(end)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run `rlcb` in this process: (status, stdout, stderr)."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main.main([str(arg) for arg in args])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def launched() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `rlcb launch local`; whatever the test does, everything is gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(Command(["launch", "local", *args], cwd=ROOT, env=environment(), text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished tiny run, not to be changed."""
    output = tmp_path_factory.mktemp("trained") / "run"
    done = tiny_run(output, "--set", "training.save_interval=2")
    assert done.returncode == 0, done.stderr
    return output


# A benchmark of seconds: Catch, four cells (PPO and A2C, one process and two workers).
MATRIX = (
    "--algorithms", "ppo", "a2c", "--modes", "sequential", "parallel", "--games", "Catch-v0", "--seeds", 1,
    "--total-timesteps", 6000, "--episodes", 20,
)  # fmt: skip
CELL_SETTINGS = (
    "--set", "env.num_envs=16", "training.n_steps=32", "training.batch_size=128", "training.log_interval=1",
    "parallel.num_workers=2", "parallel.num_envs_per_worker=null", "parallel.pin=never", "hardware.num_threads=1",
)  # fmt: skip


@pytest.fixture(scope="session")
def benchmarked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished benchmark, not to be changed; benchmark.log holds what it printed."""
    output = tmp_path_factory.mktemp("benchmarked") / "matrix"
    done = rlcb("benchmark", *MATRIX, *CELL_SETTINGS, "--output-dir", output)
    assert done.returncode == 0, done.stdout + done.stderr
    (output / "benchmark.log").write_text(done.stdout)
    return output


@pytest.fixture(scope="session")
def cells(benchmarked: Path) -> dict[str, Path]:
    """ppo_sequential, ppo_parallel, a2c_sequential, a2c_parallel -> the directory of a real run."""
    return {path.name.partition("_Catch")[0]: path for path in (benchmarked / "cells").iterdir() if path.is_dir()}
