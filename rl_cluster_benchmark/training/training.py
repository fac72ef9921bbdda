"""`rlcb train`: the course of a training run, from a config to the summary."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.stop import Interrupted, Signals
from rl_cluster_benchmark.execution.actor_learner import split
from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.learning.learner import OPTIMIZERS, Alone
from rl_cluster_benchmark.machine import planning, process
from rl_cluster_benchmark.nets.models import num_weights
from rl_cluster_benchmark.processes.pool import start_server
from rl_cluster_benchmark.processes.watchdog import limit_of, watched
from rl_cluster_benchmark.profiling.attach import attach
from rl_cluster_benchmark.run import checkpoint, resumption, summary
from rl_cluster_benchmark.run.checkpoint_format import MAX_BYTES
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.run import Run, RunMachines
from rl_cluster_benchmark.training import executions, node

BYTES_PER_OBSERVATION = {"image": 64 * 64 * 3, "vector": 200}
BYTES_PER_PARAMETER = 16  # four bytes each for the parameter, its gradient and two moments


def train(
    config: Config,
    signals: Signals,
    *,
    resume: bool = False,
    resume_if_present: bool = False,
    overwrite: bool = False,
    node_rank: int | None = None,
) -> int:
    """Train as the config says; return the exit status.

    `resume` goes on with the run in the directory, which must exist; `resume_if_present` starts one if there is none.
    """
    process.check_device(config.hardware.device)
    if not config.is_sequential:
        start_server(config.env.game)
    try:
        if config.traits.has_actors and config.is_distributed:
            config = split.fill_in(config, signals.check)
        machines = node.met(config, signals, node_rank) if config.is_distributed else contextlib.nullcontext()
        with machines as cluster:
            if cluster is not None and not cluster.is_head:
                return node.follow(cluster)
            how = {"resume": resume, "resume_if_present": resume_if_present, "overwrite": overwrite}
            with _opened(config, signals, cluster, **how) as run:
                if run is None:
                    return 0
                if run.config.is_sequential:
                    attach(0)
                    learn(Worker.of(run), run, Alone())
                else:
                    executions.train(run, cluster or MachineAlone(run.plan, signals))
            return signals.status
    except Interrupted:
        known = "" if config.is_distributed else ": no file of a run was written or removed"  # else others may have
        print(f"Stopped before training began{known}.", flush=True)
        return signals.status


@contextlib.contextmanager
def _opened(
    config: Config, signals: Signals, cluster: Cluster | None, *, resume: bool, resume_if_present: bool, overwrite: bool
) -> Iterator[Run | None]:
    """Provide the run in one process, on one machine, or on the head of a cluster: all between claim and summary.

    None is provided if the run has already finished.
    """
    directory = RunDirectory.of(config)
    job = cluster.place.job if cluster is not None and cluster.place.is_restart else ""
    may_resume = resume or resume_if_present or directory.was_begun_by(job)  # a job may have restarted its command
    if may_resume:
        config = resumption.check(config, directory, must_exist=resume) or config
        if not directory.holds_a_run() and directory.has_something_to_replace():
            raise UserError(
                f"There is no run in {directory.root} to go on with, and a new one would replace what is there of "
                f"another: {directory.contents()}. Add --overwrite (instead of --resume-if-present) to replace it, "
                "or choose another --output-dir."
            )
    if config.traits.has_actors and config.is_parallel:
        config = split.fill_in(config, signals.check)
    config, plan = planning.resolve(config)
    may_be_ending = cluster is not None and bool(may_resume or job)  # whether an earlier attempt may still hold locks
    patience = config.cluster.timeout if may_be_ending else 0.0
    claim = directory.claim(may_hold_a_run=may_resume or overwrite, patience=patience, job=job)
    try:
        seen = directory.contents()
        resume = (may_resume or directory.was_begun_by(job)) and directory.holds_a_run()
        found = checkpoint.newest(directory) if resume else None
        if found is None and seen and ((may_resume and not resume) or (resume and "checkpoint" in seen)):
            raise directory.changed(seen, "")
        resumed_path, resumed_from = found or (None, None)
        if overwrite and not resume:
            checkpoint.check_own(directory)
        if cluster is not None:
            config, plan = node.on_this_cluster(config, cluster, resumed_from)
        plan = planning.compiled(config, plan)
        _check_memory(config, plan)
        if not resume:  # runs of older versions may have such a setting, and go on
            _check_replay(config)
        run = Run(
            config,
            plan,
            directory,
            signals,
            resume=resume,
            resumed_path=resumed_path,
            resumed_from=resumed_from,
            may_write=claim.check,
            may_begin=partial(directory.check_unchanged, seen) if found is None else lambda: None,
            machines=_machines_of(cluster) if cluster is not None else None,
        )
        if run.has_finished():
            print("Nothing is left to do: raise --total-timesteps or --duration to go on with this run.", flush=True)
            if cluster is not None:
                node.send_home(cluster)
            yield None
            return
        print("\n".join(_header(config, plan, directory, cluster)), flush=True)
        if resumed_from is not None:
            steps, updates = resumed_from["progress"]["steps"], resumed_from["progress"]["updates"]
            print(f"Resumed from {resumed_path}: {steps:,} steps, {updates:,} updates.", flush=True)
        elif may_resume or resume:
            print("No checkpoint to resume from: starting at the beginning.", flush=True)
        elif directory.has_something_to_replace():
            print(f"Replacing the run in {directory.root} when training begins: {directory.contents()}.", flush=True)
        run.check_begun()
        if cluster is not None:
            node.agree_on_work(cluster, config, directory.root, resumed_path, run.progress_state())
        is_parent = not config.is_sequential
        with watched(limit_of(config), is_parent=is_parent, waits_for=run.waits_for), summary.written(run):
            yield run
    finally:
        claim.release()


def _machines_of(cluster: Cluster) -> RunMachines:
    jobs = [member.job for member in cluster.nodes]
    return RunMachines(cluster.shares(), jobs, cluster.num_learners, cluster.membership.memory_elsewhere)


def _check_memory(config: Config, plan: planning.Plan) -> None:
    """Raise a UserError for a network or a rollout that does not fit into memory, instead of a later failure."""
    weights = num_weights(config)
    network = BYTES_PER_PARAMETER * weights
    if network > plan.machine.memory_bytes:
        raise UserError(
            f"A network of these sizes and its optimiser take {network / 2**30:,.0f} GiB, this machine has "
            f"{plan.machine.memory_bytes / 2**30:,.0f}; use smaller model.channels, model.hidden_size or "
            "model.mlp_sizes."
        )
    saved = 4 * weights * (1 + len(OPTIMIZERS[config.training.optimizer].MOMENTS))
    if saved > MAX_BYTES:
        raise UserError(
            f"A checkpoint of a network of these sizes has {saved / 2**30:,.1f} GiB, and at most "
            f"{MAX_BYTES / 2**30:,.0f} can be read again; use smaller model.channels, model.hidden_size or "
            "model.mlp_sizes."
        )
    share = config.num_machines
    size = config.rollout_size // share * BYTES_PER_OBSERVATION["image" if config.env.has_images else "vector"]
    if plan.num_learners:
        size *= config.impala.pages_per_actor
    if size > plan.machine.memory_bytes:
        raise UserError(
            f"A rollout of {config.env.num_envs:,} environments x {config.training.n_steps:,} steps takes "
            f"{size / 2**30:,.0f} GiB, this machine has {plan.machine.memory_bytes / 2**30:,.0f}; "
            "use fewer environments or steps."
        )


def _check_replay(config: Config) -> None:
    """Raise a UserError if impala.replay_fraction is set where it does nothing: results would be named after it."""
    if config.traits.has_actors and config.is_sequential and config.impala.replay_fraction > 0:
        raise UserError(
            f"impala.replay_fraction = {config.impala.replay_fraction:g} does nothing in sequential mode: there is no "
            "replay in one process. Leave it out, or take --mode parallel."
        )


def _synchronisation(config: Config) -> str:
    cluster = config.cluster
    if cluster.sync != "allreduce":
        return f"{cluster.sync} (parameters averaged every {cluster.sync_every} updates)"
    return "allreduce" + (f" in {cluster.compression}" if cluster.compression != "none" else "")


def _header(config: Config, plan: planning.Plan, directory: RunDirectory, cluster: Cluster | None) -> list[str]:
    line = "=" * 70
    hours = config.training.duration_hours
    end = f"{config.training.total_timesteps:,} steps" + (f" or {hours:g} hours" if hours else "")
    rows = [
        line,
        f"{config.traits.label} {config.mode.capitalize()} Training",
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
    if config.traits.has_minibatches and config.training.batch_size > config.rollout_size:
        rows.append(
            f"Note: batch_size {config.training.batch_size} is more than a rollout of {config.rollout_size}; "
            "each epoch is one minibatch."
        )
    return [*rows, line]
