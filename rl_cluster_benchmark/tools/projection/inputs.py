"""What a projection starts from: one machine's updates, what Gloo costs here, and the networks to project to."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.checkup import expectation
from rl_cluster_benchmark.tools.checkup.hosts import measure_together
from rl_cluster_benchmark.tools.checkup.probe import Measurements
from rl_cluster_benchmark.tools.launch.launch_processes import Lines, LocalProcess
from rl_cluster_benchmark.tools.scaling import model
from rl_cluster_benchmark.tools.scaling.cases import MEASURED
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate, measure

LOOPBACK = "127.0.0.1"
SECONDS_FOR_GLOO = 120
OF_THE_RUN = (
    "algorithm", "env", "num_envs", "num_workers", "precision", "engine", "cpu_model", "git_commit", "versions",
)  # fmt: skip
TYPICAL = {  # round trip in seconds, bits per second
    "10 Gbit/s, 0.1 ms": (0.1e-3, 10e9),
    "1 Gbit/s, 1 ms": (1e-3, 1e9),
    "100 Mbit/s, 10 ms": (10e-3, 100e6),
}


@dataclass(frozen=True)
class Measured:
    """What was measured here and projection.json keeps, so that other networks need no new measurement."""

    work: model.MachineWork
    spread: model.Spread
    software: model.Network  # between processes on this machine: what Gloo itself takes
    sync_every: int
    batch: int  # samples of a step of the optimiser on one machine
    run: dict[str, Any]  # what was trained, on what

    @classmethod
    def from_file(cls, path: Path) -> Measured:
        try:
            measured = TypeAdapter(cls).validate_python(json.loads(path.read_text())["measured"])
            missing = [key for key in (*OF_THE_RUN, "updates") if key not in measured.run]
            if missing or not (measured.work.seconds > 0 and measured.work.steps > 0):
                raise ValueError(f"it lacks {', '.join(missing) or 'the time of an update'}")
            return measured
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error)
        raise UserError(f"{path} is no projection.json of `rlcb scaling --project` ({reason}).")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_here(config: Config, seconds: float, folder: Path, interrupted: Callable[[], bool]) -> Measured:
    """Train on this machine alone for a while, and let two processes on it sum gradients."""
    config, machine = _alone(config), detection.detect()
    workers = config.parallel.num_workers or machine.usable_cores
    cores = [set(machine.physical_cores[:workers])]
    (rate,) = measure([config], cores, folder / "alone", seconds=seconds, interrupted=interrupted)
    work = work_from(config, rate)
    software = software_cost()
    return Measured(
        work,
        spread_from(rate),
        software,
        sync_every=config.cluster.sync_every,
        batch=optimizer_steps(config, rate.summary)[0],
        run={key: rate.summary[key] for key in OF_THE_RUN} | {"updates": rate.updates, "seconds": rate.seconds},
    )


def _alone(config: Config) -> Config:
    """Return the config of a run on this machine alone, as it would be among many."""
    changes: dict[str, object] = {"cluster.sync": "allreduce"}
    if config.traits.is_in_step:
        changes |= {"mode": "distributed", "cluster.num_workers": 1, "cluster.min_nodes": None}
        changes |= {"cluster.master_addr": LOOPBACK, "cluster.master_port": free_port()}
    else:
        changes = {"mode": "parallel"}
    config = config_files.with_changes(config, MEASURED | changes, source="projection")
    each = config.parallel.num_envs_per_worker
    if config.is_distributed and each is not None:  # as the head would fill it in
        workers = config.parallel.num_workers or detection.detect().usable_cores
        filled = {"env.num_envs": each * workers, "parallel.num_envs_per_worker": None}
        config = config_files.with_changes(config, filled, source="projection")
    return config


def work_from(config: Config, rate: Rate) -> model.MachineWork:
    """Divide an update into its rollout and its minibatches."""
    from rl_cluster_benchmark.execution.reduce import VECTOR_SPARE
    from rl_cluster_benchmark.execution.task import Task
    from rl_cluster_benchmark.learning.learner import OPTIMIZERS

    seconds = rate.seconds / rate.updates
    learning = sum(rate.shares[phase] for phase in ("update", "communication", "waiting"))
    _, minibatches = optimizer_steps(config, rate.summary)
    return model.MachineWork(
        steps=rate.fps * seconds,
        rollout_seconds=(1 - learning) * seconds,
        minibatch_seconds=learning * seconds / minibatches,
        minibatches=minibatches,
        vector_bytes=4 * (Task.of(config).num_parameters + VECTOR_SPARE),
        state_vectors=1 + len(OPTIMIZERS[config.training.optimizer].MOMENTS),
        small_sums=model.MachineWork.small_sums - (not config.training.normalize_reward),
    )


def optimizer_steps(config: Config, summary: dict[str, Any]) -> tuple[int, int]:
    """Return (samples of a step of the optimiser, steps in an update) on one machine; `summary` is of a run there."""
    if config.traits.has_minibatches:
        return config.batch_size, config.training.n_epochs * -(-config.rollout_size // config.batch_size)
    if config.traits.is_lock_free:  # each worker steps by itself, with its own rollout
        return config.training.n_steps * summary["num_envs"] // summary["num_workers"], 1
    if config.traits.has_actors:
        filled = {"env.num_envs": summary["num_envs"], "parallel.num_envs_per_worker": None}
        filled |= {"impala.num_learners": summary["num_learners"]}
        unrolls = config_files.with_changes(config, filled, source="projection").unrolls_per_step
        steps = max(1, round(summary["num_envs"] / unrolls)) * config.impala.passes
        return unrolls * config.training.n_steps, steps
    return config.rollout_size, 1


def spread_from(rate: Rate) -> model.Spread:
    """Return how much updates vary; how much machines differ cannot be seen on one of them."""
    times = rate.update_seconds
    jitter = statistics.pstdev(times) / statistics.mean(times) if len(times) > 1 else 0.0
    return model.Spread(0.0, jitter, piece_seconds=rate.seconds / rate.updates)


def software_cost() -> model.Network:
    """Return what Gloo itself takes, between two processes on this machine through the loopback interface."""
    sums = gloo_on_loopback().sums
    assert sums is not None
    return expectation.network_of(sums)


def gloo_on_loopback(nodes: int = 2) -> Measurements:
    """Let processes on this machine sum gradients, through the loopback interface."""

    def start(rank: int, call: Sequence[str], lines: Lines) -> LocalProcess:
        return LocalProcess(f"process {rank}", [sys.executable, *call], lines, os.environ)

    arguments = ["--master-addr", LOOPBACK, "--master-port", str(free_port())]
    measured, errors = measure_together(start, nodes, arguments, SECONDS_FOR_GLOO)
    if measured is None:
        why = "; ".join(f"{name}: {error}" for name, error in errors.items()) or "no figures came back"
        raise TrainingFailedError(f"Gloo could not be measured on this machine ({why}).")
    return measured


def typical(software: model.Network, *, round_trip: float, bits_per_second: float) -> model.Network:
    """Return the network that these figures describe.

    Each hop adds a round trip, for Gloo sends what the receiver has said it is ready for; the slower of wire and Gloo
    sets the rate.
    """
    bandwidth = min(bits_per_second / 8, software.bandwidth)
    return model.Network(software.latency + round_trip, bandwidth, software.cast_seconds)


def from_doctor(path: Path) -> tuple[model.Network, float]:
    """Read a network that `rlcb doctor --cluster --json` has measured, and how much its machines differ in speed."""
    try:
        measured = Measurements.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} was not written by `rlcb doctor --cluster --json` ({error}).") from None
    if measured.sums is None:
        raise UserError(f"{path} tells of one machine; a network needs two.")
    return expectation.network_of(measured.sums), expectation.spread_of(measured.members).between
