"""What is measured for each number of workers: one run of all of them, and runs of as many that never talk.

Both are runs of `rlcb train`, made from configs alone: nothing here knows an algorithm. The workers together get as
many cores and use them as the algorithm does; an independent run is sequential mode with one of these cores and a
worker's share of everything else: environments, and part of each minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.machine.detection import Machine

# A measured run ends when the sweep says so, does every step of every update, and writes nothing but its metrics.
MEASURED: dict[str, object] = {
    "training.total_timesteps": 10**15,
    "training.duration_hours": None,
    "training.target_kl": None,
    "training.log_interval": 1,
    "training.save_interval": 10**9,
    "logging.checkpoint_minutes": 1e9,
    "logging.tensorboard": False,
}


@dataclass(frozen=True)
class Case:
    """What is measured for one number of workers."""

    workers: int
    num_envs: int  # in all
    together: Config
    independents: list[Config]  # one for each worker
    cores: tuple[int, ...]  # of them all
    pinned: bool  # one to a core

    @property
    def envs_per_worker(self) -> int:
        return self.num_envs // self.workers

    def core_sets(self) -> list[set[int]]:
        """Return what each independent run may use: the cores that the workers have, in the way they have them."""
        return [{core} if self.pinned else set(self.cores) for core in self.cores]


@dataclass(frozen=True)
class UpdateWork:
    """What an update consists of, whoever does it."""

    num_envs: int  # in all; or of each worker, when `per_worker`
    per_worker: bool
    minibatches: int

    @classmethod
    def of(cls, config: Config, envs_per_worker: int | None, machine: Machine) -> UpdateWork:
        """Return the work of the run that `rlcb train --mode parallel` with this config would be.

        With the environments per worker fixed it has as many minibatches as that run.
        """
        parallel = config.parallel
        total = config.env.num_envs
        if parallel.num_envs_per_worker is not None:
            total = parallel.num_envs_per_worker * (parallel.num_workers or machine.usable_cores)
        # Built to be checked: an algorithm whose minibatches must divide the rollout says so.
        whole = _build(config, "config", {"mode": "sequential", "env.num_envs": total})
        minibatches = whole.rollout_size // whole.batch_size
        if envs_per_worker is not None:
            return cls(envs_per_worker, True, minibatches)
        return cls(total, False, minibatches)

    def envs_of_each(self, workers: int) -> int:
        if self.per_worker:
            return self.num_envs
        if self.num_envs % workers:
            raise UserError(
                f"{self.num_envs} environments cannot be shared evenly by {workers} workers, and unequal shares would "
                "be measured as waiting; change --num-envs or --workers, or use --envs-per-worker."
            )
        return self.num_envs // workers


def choose_counts(asked: Sequence[int] | None, machine: Machine) -> tuple[list[int], list[int]]:
    """Return the numbers of workers to measure, ascending from 1, and those for which the cores do not suffice.

    By default the powers of two that fit.
    """
    most = machine.usable_cores
    wanted = {2**i for i in range(most.bit_length())} if asked is None else {1, *asked}
    if asked is not None and min(asked) > most:
        raise UserError(f"--workers starts at {min(asked)}, but {most} is the most that the usable cores allow.")
    return sorted(n for n in wanted if n <= most), sorted(n for n in wanted if n > most)


def make_cases(config: Config, counts: Sequence[int], envs_per_worker: int | None, machine: Machine) -> list[Case]:
    if (config.hardware.num_threads or 1) > 1:
        raise UserError(
            f"A worker is measured on one core: hardware.num_threads = {config.hardware.num_threads} must be 1."
        )
    work = UpdateWork.of(config, envs_per_worker, machine)
    return [_case(config, workers, work, machine) for workers in counts]


def _case(config: Config, workers: int, work: UpdateWork, machine: Machine) -> Case:
    envs, n_steps = work.envs_of_each(workers), config.training.n_steps
    if envs * n_steps % work.minibatches:
        raise UserError(
            f"With {workers} workers, a worker's rollout of {envs} environments x {n_steps} steps cannot be cut into "
            f"{work.minibatches} equal minibatches; change --num-envs, --batch-size or --workers."
        )
    batch = envs * n_steps // work.minibatches
    together = _build(
        config,
        f"{workers} workers",
        {
            "mode": "parallel",
            "parallel.num_workers": None,  # all the cores it gets; some algorithms divide them among several roles
            "parallel.num_envs_per_worker": None,
            "env.num_envs": envs * workers,
            "training.batch_size": batch * workers,
        },
    )
    independents = [
        _build(
            together,
            f"a worker of {workers} by itself",
            {
                "mode": "sequential",
                "env.num_envs": envs,
                "env.seed": (config.env.seed + rank) % 2**32,  # other episodes on each core, as the workers have
                "training.batch_size": batch,
                "hardware.num_threads": 1,
            },
        )
        for rank in range(workers)
    ]
    cores = machine.physical_cores[:workers]  # a run that has all of its cores to itself pins its workers
    return Case(workers, envs * workers, together, independents, cores, pinned=config.parallel.pin != "never")


def _build(config: Config, source: str, changes: dict[str, Any]) -> Config:
    return config_files.with_changes(config, MEASURED | changes, source=source)
