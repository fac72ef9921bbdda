"""Commands as a person runs them, and small runs made with them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.forked import Command
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.kernels import native_network
from rl_cluster_benchmark.run import checkpoint

ROOT = Path(__file__).parents[2]

needs_native = pytest.mark.skipif(not native_network.available("impala"), reason="needs a C compiler")


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


# A benchmark of seconds: Catch, four cells (PPO and A2C, one process and two workers).
MATRIX = (
    "--algorithms", "ppo", "a2c", "--modes", "sequential", "parallel", "--games", "Catch-v0", "--seeds", 1,
    "--total-timesteps", 6000, "--episodes", 20,
)  # fmt: skip
CELL_SETTINGS = (
    "--set", "env.num_envs=16", "training.n_steps=32", "training.batch_size=128", "training.log_interval=1",
    "parallel.num_workers=2", "parallel.num_envs_per_worker=null", "parallel.pin=never", "hardware.num_threads=1",
)  # fmt: skip
