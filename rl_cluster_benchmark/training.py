"""`rlcb train`: from a config to a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rl_cluster_benchmark import hardware
from rl_cluster_benchmark.cluster import node
from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.execution import (
    actor_learner,
    data_parallel,
    hogwild,
    sequential,
    several_machines,
    split,
)
from rl_cluster_benchmark.execution.watchdog import limit_of, watched
from rl_cluster_benchmark.execution.workers import start_server
from rl_cluster_benchmark.run import checkpoint, summary
from rl_cluster_benchmark.run.directory import ALGORITHM_NAMES, RunDirectory
from rl_cluster_benchmark.run.run import Run, exit_status
from rl_cluster_benchmark.run.stop import Signals

EXECUTIONS = {"sequential": sequential.train, "parallel": data_parallel.train}
ASYNCHRONOUS = {"a3c": hogwild.train, "impala": actor_learner.train}  # instead, in parallel mode

BYTES_PER_OBSERVATION = {"game": 64 * 64 * 3, "toy": 200}


def train(
    config: Config, signals: Signals, *, resume: bool = False, overwrite: bool = False, node_rank: int | None = None
) -> int:
    """Train as the config says; returns the exit status."""
    hardware.check_device(config.hardware.device)
    if config.mode != "sequential":
        start_server(config.env.game)
    if config.algorithm == "impala" and config.mode != "sequential":
        config = split.fill_in(config)

    def train_here(cluster: Cluster | None = None) -> int:
        return _train(config, signals, resume=resume, overwrite=overwrite, cluster=cluster)

    return node.train(config, signals, node_rank, train_here) if config.mode == "distributed" else train_here()


def _train(config: Config, signals: Signals, *, resume: bool, overwrite: bool, cluster: Cluster | None) -> int:
    """In one process, on one machine, or on the head of a cluster."""
    config, plan = hardware.resolve(config)
    directory = RunDirectory.of(config)
    jobs = [n.job for n in cluster.nodes] if cluster is not None else []
    if cluster is not None and cluster.place.is_restart and directory.belongs_to(cluster.place.job):
        resume = True  # a scheduler has started the same command again
    patience = config.cluster.timeout if cluster is not None and resume else 0.0  # the last head may still be ending
    claim = directory.claim(may_hold_a_run=resume or overwrite, patience=patience, jobs=jobs)
    try:
        found = checkpoint.newest(directory) if resume else None
        resumed_path, resumed_from = found or (None, None)
        if resumed_from is not None:
            _check_same_task(config, resumed_from)
        if cluster is not None:
            config, plan = node.config_of_this_node(node.on_this_cluster(config, cluster, resumed_from), cluster)
        plan = hardware.compiled(config, plan)
        _check_memory(config, plan)
        print("\n".join(_header(config, plan, directory, cluster)), flush=True)
        if resumed_from is not None:
            steps, updates = resumed_from["progress"]["steps"], resumed_from["progress"]["updates"]
            print(f"Resumed from {resumed_path}: {steps:,} steps, {updates:,} updates.", flush=True)
        elif resume:
            print("No checkpoint to resume from: starting at the beginning.", flush=True)
        run = Run(config, plan, directory, signals, resume=resume, resumed_path=resumed_path, resumed_from=resumed_from)
        run.may_write = claim.check
        if cluster is not None:
            run.nodes, run.num_learners = cluster.shares(), cluster.num_learners
            run.memory_elsewhere = cluster.membership.memory_elsewhere
            node.agree_on_work(cluster, config, directory.root, resumed_path, run.progress_state())
        if run.is_complete() or run.should_stop():
            print("Nothing is left to do: raise --total-timesteps or --duration to go on with this run.", flush=True)
        try:
            with run, watched(limit_of(config), is_parent=config.mode != "sequential"):
                if cluster is not None:
                    several_machines.of(config).train(run, cluster)
                else:
                    _execution(config)(run)
        finally:
            if run.summary is not None:
                with contextlib.suppress(OSError):
                    print(summary.block(run.summary, directory), flush=True)
        return exit_status(run)
    finally:
        claim.release()


def _execution(config: Config) -> Callable[[Run], None]:
    if config.mode == "parallel" and config.algorithm in ASYNCHRONOUS:
        return ASYNCHRONOUS[config.algorithm]
    return EXECUTIONS[config.mode]


def _check_memory(config: Config, plan: hardware.Plan) -> None:
    """The rollout must fit: a clear word now instead of an allocation that fails later."""
    share = config.num_machines
    size = config.rollout_size // share * BYTES_PER_OBSERVATION["game" if config.env.game else "toy"]
    if plan.num_learners:
        size *= config.impala.pages_per_actor
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


def _synchronisation(config: Config) -> str:
    cluster = config.cluster
    if cluster.sync != "allreduce":
        return f"{cluster.sync} (parameters averaged every {cluster.sync_every} updates)"
    return "allreduce" + (f" in {cluster.compression}" if cluster.compression != "none" else "")


def _header(config: Config, plan: hardware.Plan, directory: RunDirectory, cluster: Cluster | None) -> list[str]:
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
    if cluster is not None:
        machines = ", ".join(f"{n.name} ({n.processes}, {n.address})" for n in cluster.nodes)
        rows.append(f"Machines: {len(cluster.nodes)}: {machines} | Synchronisation: {_synchronisation(config)}")
    if config.algorithm == "ppo" and config.training.batch_size > config.rollout_size:
        rows.append(
            f"Note: batch_size {config.training.batch_size} is more than a rollout of {config.rollout_size}; "
            "each epoch is one minibatch."
        )
    return [*rows, line]
