"""`rlcb train`: from a config to a finished run."""

from __future__ import annotations

import os
from typing import Any

import torch

from rl_cluster_benchmark import hardware, kernels
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.execution import data_parallel, sequential
from rl_cluster_benchmark.execution.loop import ALGORITHMS
from rl_cluster_benchmark.run import checkpoint, summary
from rl_cluster_benchmark.run.directory import ALGORITHM_NAMES, RunDirectory
from rl_cluster_benchmark.run.run import Run, exit_status
from rl_cluster_benchmark.run.stop import Signals

EXECUTIONS = {"sequential": sequential.train, "parallel": data_parallel.train}


def train(config: Config, signals: Signals, *, resume: bool = False, overwrite: bool = False) -> int:
    """Train as the config says; returns the exit status."""
    _check_available(config)
    _check_device(config)
    config, plan = hardware.resolve(config)
    directory = RunDirectory.of(config)
    lock = directory.claim(resume=resume, overwrite=overwrite)
    try:
        found = checkpoint.newest(directory) if resume else None
        resumed_from = found[1] if found else None
        if resumed_from is not None:
            _check_same_task(config, resumed_from)
        print("\n".join(_header(config, plan, directory)), flush=True)
        if found is not None:
            progress = found[1]["progress"]
            print(f"Resumed from {found[0]}: {progress['steps']:,} steps, {progress['updates']:,} updates.", flush=True)
        elif resume:
            print("No checkpoint to resume from: starting at the beginning.", flush=True)
        kernels.available()  # compile now, not in the first rollout, and once for all workers
        run = Run(config, plan, directory, signals, *(found or ()))
        try:
            with run:
                EXECUTIONS[config.mode](run)
        except TrainingFailedError:
            print(summary.block(run.summary, directory))
            raise
        print(summary.block(run.summary, directory))
        return exit_status(run)
    finally:
        os.close(lock)


def _check_available(config: Config) -> None:
    if config.algorithm not in ALGORITHMS or config.mode not in EXECUTIONS:
        name = ALGORITHM_NAMES[config.algorithm]
        raise UserError(
            f"{name} in {config.mode} mode is not part of this version, which has {', '.join(ALGORITHMS)} in "
            f"{' and '.join(EXECUTIONS)} mode."
        )


def _check_device(config: Config) -> None:
    if config.hardware.device == "cpu":
        return
    device = torch.device(config.hardware.device)
    if not torch.cuda.is_available():
        raise UserError(f"hardware.device = {config.hardware.device}, but this torch sees no CUDA device; use cpu.")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise UserError(
            f"hardware.device = {config.hardware.device}, but there are {torch.cuda.device_count()} devices."
        )


def _check_same_task(config: Config, checkpoint: dict[str, Any]) -> None:
    before = checkpoint["config"]
    was = f"{before['algorithm']} {before['mode']} on {before['env']['name']}"
    now = f"{config.algorithm} {config.mode} on {config.env.name}"
    if was != now:
        raise UserError(f"The run to resume is {was}, not {now}; resume it as it was or choose another --output-dir.")


def _header(config: Config, plan: hardware.Plan, directory: RunDirectory) -> list[str]:
    line = "=" * 70
    hours = config.training.duration_hours
    end = f"{config.training.total_timesteps:,} steps" + (f" or {hours:g} hours" if hours else "")
    rows = [
        line,
        f"{ALGORITHM_NAMES[config.algorithm]} {config.mode.capitalize()} Training",
        line,
        f"Environment: {config.env.name}",
        f"Num environments: {config.env.num_envs}",
        f"Until: {end}",
        f"Device: {config.hardware.device}",
        f"Output: {directory.root}",
        *plan.lines(config),
    ]
    if config.training.batch_size > config.rollout_size:
        rows.append(
            f"Note: batch_size {config.training.batch_size} is more than a rollout of {config.rollout_size}; "
            "each epoch is one minibatch."
        )
    return [*rows, line]
