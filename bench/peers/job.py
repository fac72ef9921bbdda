"""The job that every library does, and the report in which a script says how far it is and what it did for it.

The scripts run in the virtual environments of the libraries: this module needs torch, numpy and EnvPool alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn

PARAMETERS = 626_256  # IMPALA-CNN 16-32-32 + 256, 15 actions, one value
NUM_LEVELS = 200
NORMALISED, RAW = "normalised", "raw"  # by the running deviation of the discounted return, or as the game gives it
NUM_ACTIONS = 15
COUNTS = ("optimizer_steps", "trained_samples", "parameters")
OPTIMIZER_STEPS, TRAINED_SAMPLES, PARAMETERS_SEEN = range(len(COUNTS))


@dataclass(frozen=True)
class Job:
    """What is learned from how much: the published Procgen setting for PPO."""

    algorithm: str
    n_steps: int
    batch_size: int  # samples of an optimiser step
    epochs: int
    learning_rate: float
    gae_lambda: float
    max_grad_norm: float
    num_envs: int = 64
    gamma: float = 0.999
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    seed: int = 1

    @property
    def rollout(self) -> int:
        return self.num_envs * self.n_steps

    @property
    def minibatches(self) -> int:
        return self.rollout // self.batch_size

    def with_steps(self, n_steps: int | None) -> Job:
        """Another length of rollouts; as many minibatches of each."""
        if n_steps is None:
            return self
        batch_size = self.batch_size if self.algorithm == "impala" else self.num_envs * n_steps // self.minibatches
        return replace(self, n_steps=n_steps, batch_size=batch_size)


JOBS = {
    "ppo": Job("ppo", n_steps=256, batch_size=2048, epochs=3, learning_rate=5e-4, gae_lambda=0.95, max_grad_norm=0.5),
    "a2c": Job("a2c", n_steps=5, batch_size=320, epochs=1, learning_rate=7e-4, gae_lambda=1.0, max_grad_norm=0.5),
    "impala": Job(
        "impala", n_steps=32, batch_size=1024, epochs=1, learning_rate=5e-4, gae_lambda=1.0, max_grad_norm=40.0
    ),
}


class Report:
    """A file with a line of facts and a line after every update, which the benchmark reads while the script runs.

    Optimiser steps and samples are counted where they happen, by hooks of torch; the counts lie in a mapped file,
    because some libraries learn in another process than the one that reports.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        counts = path.with_suffix(".counts")
        if not counts.exists():
            counts.write_bytes(bytes(8 * len(COUNTS)))
        self._counts = np.memmap(counts, dtype=np.int64, mode="r+")

    def facts(self, **facts: Any) -> None:
        """What the job was: network, levels, reward, precision, versions, setting."""
        self._write(facts=facts)

    def count(self, trunk: nn.Module, *modules: nn.Module) -> None:
        """From now on every optimiser step of this process, and every sample whose gradient passes the trunk.

        The modules, the trunk among them, are all there is to learn.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(*_: object) -> None:
            self._counts[OPTIMIZER_STEPS] += 1

        def passed(_: nn.Module, __: Any, features: Tensor) -> None:
            if features.requires_grad:  # counted when the gradient comes back, not for a look ahead
                samples = features.numel() // features.shape[-1]
                features.register_hook(lambda _: learned_from(samples))

        def learned_from(samples: int) -> None:
            self._counts[TRAINED_SAMPLES] += samples

        register_optimizer_step_post_hook(stepped)
        trunk.register_forward_hook(passed)
        unique = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
        self._counts[PARAMETERS_SEEN] = sum(unique.values())

    def update(self, env_steps: int, at: float | None = None) -> None:
        """After an update: so many steps have been taken in the environments and learned from."""
        counts = {name: int(self._counts[i]) for i, name in enumerate(COUNTS)}
        self._write(time=time.monotonic() if at is None else at, env_steps=env_steps, **counts)

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    """The command line of every script: `.job` and `.report` are ready to use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=JOBS, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--n-steps", type=int)
    parser.add_argument("--precision", default="auto", help="of ours alone")
    parser.add_argument("--seconds", type=float, help="end by itself after this time of training")
    parser.add_argument("--save", type=Path, help="with --seconds: write the network here")
    args = parser.parse_args()
    args.job = JOBS[args.algorithm].with_steps(args.n_steps)
    args.report = Report(args.report)
    return args


def make_pool(num_envs: int, *, channel_first: bool, seed: int, num_threads: int | None = None) -> Any:
    """EnvPool's CoinRun, easy, on the training levels."""
    from rl_cluster_benchmark.env.environments import load_envpool

    return load_envpool().make(
        "CoinrunEasy-v0",
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=num_threads or min(num_envs, usable_cores()),
        seed=seed,
        channel_first=channel_first,
        num_levels=NUM_LEVELS,
        start_level=0,
    )


def levels_of(pool: Any) -> str:
    """As the environment itself has them."""
    config = pool.spec.config
    mode = {0: "easy", 1: "hard"}.get(config.distribution_mode, str(config.distribution_mode))
    return f"{config.env_name} {mode}, {config.num_levels} from {config.start_level}"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in (*packages, "torch", "envpool", "gymnasium", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a package that was carried as bare files
            found[name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version()}
