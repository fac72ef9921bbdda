"""`rlcb train`: from a config to a finished run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from rl_cluster_benchmark import hardware
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.execution import data_parallel, sequential
from rl_cluster_benchmark.execution.loop import ALGORITHMS
from rl_cluster_benchmark.execution.workers import preload_game
from rl_cluster_benchmark.kernels import network, pooling
from rl_cluster_benchmark.run import checkpoint, summary
from rl_cluster_benchmark.run.directory import ALGORITHM_NAMES, RunDirectory
from rl_cluster_benchmark.run.run import Run, exit_status
from rl_cluster_benchmark.run.stop import Signals

EXECUTIONS = {"sequential": sequential.train, "parallel": data_parallel.train}

BYTES_PER_OBSERVATION = {"game": 64 * 64 * 3, "toy": 200}


def train(config: Config, signals: Signals, *, resume: bool = False, overwrite: bool = False) -> int:
    """Train as the config says; returns the exit status."""
    _check_available(config)
    hardware.check_device(config.hardware.device)
    config, plan = hardware.resolve(config)
    plan = _compile(config, plan)
    preload_game(config.env.game)
    _check_memory(config, plan)
    directory = RunDirectory.of(config)
    lock = directory.claim(may_hold_a_run=resume or overwrite)
    try:
        found = checkpoint.newest(directory) if resume else None
        resumed_path, resumed_from = found or (None, None)
        if resumed_from is not None:
            _check_same_task(config, resumed_from)
        print("\n".join(_header(config, plan, directory)), flush=True)
        if resumed_from is not None:
            steps, updates = resumed_from["progress"]["steps"], resumed_from["progress"]["updates"]
            print(f"Resumed from {resumed_path}: {steps:,} steps, {updates:,} updates.", flush=True)
        elif resume:
            print("No checkpoint to resume from: starting at the beginning.", flush=True)
        run = Run(config, plan, directory, signals, resume=resume, resumed_path=resumed_path, resumed_from=resumed_from)
        if run.is_complete() or run.should_stop():
            print("Nothing is left to do: raise --total-timesteps or --duration to go on with this run.", flush=True)
        try:
            with run:
                EXECUTIONS[config.mode](run)
        finally:
            if run.summary is not None:
                with contextlib.suppress(OSError):
                    print(summary.block(run.summary, directory), flush=True)
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


def _compile(config: Config, plan: hardware.Plan) -> hardware.Plan:
    """Before the first rollout, and once for all workers; the plan as it turns out to be possible."""
    pooling.available()
    architecture = "impala" if config.model.architecture == "auto" else config.model.architecture
    if plan.engine == "native" and not network.available(architecture):
        if config.hardware.engine == "native":
            raise UserError("hardware.engine = native needs AMX or AVX512-BF16 and a C compiler; see rlcb doctor.")
        return dataclasses.replace(plan, engine="torch")
    return plan


def _check_memory(config: Config, plan: hardware.Plan) -> None:
    """The rollout must fit: a clear word now instead of an allocation that fails later."""
    size = config.rollout_size * BYTES_PER_OBSERVATION["game" if config.env.game else "toy"]
    if size > plan.machine.memory_bytes:
        raise UserError(
            f"A rollout of {config.env.num_envs:,} environments x {config.training.n_steps:,} steps takes "
            f"{size / 2**30:,.0f} GiB, this machine has {plan.machine.memory_bytes / 2**30:,.0f}; "
            "use fewer environments or steps."
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
