"""How a run uses the machine: workers, threads, precision and micro-batch. Every `auto` is decided here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_cluster_benchmark.config.config_files import with_workers
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.machine.detection import Machine
from rl_cluster_benchmark.machine.process import dtype

if TYPE_CHECKING:
    import torch

BALANCE = 0.5  # a core of half the speed of the others still finishes with them
SAMPLES_PER_THREAD = 64  # of a backward pass: their activations stay in one core's cache
FEW_CORES = 2  # for actors and learners: too few to split


@dataclass(frozen=True)
class Plan:
    """How this run uses the machine: what was asked for, with every `auto` decided."""

    machine: Machine
    num_workers: int
    num_threads: int  # of each process that computes
    cores: tuple[int | None, ...]  # that each worker is pinned to
    precision: str
    precision_reason: str
    engine: str  # that computes the network: native or torch
    micro_batch: int
    balance: float  # share of a minibatch that goes to whichever worker is free
    num_learners: int = 0  # of IMPALA but in sequential mode; num_workers are its actors

    def shares_work(self, config: Config) -> bool:
        """Do its workers share minibatches, and with them the parameters?"""
        in_step = config.algorithm in ("ppo", "a2c") and config.mode != "sequential"
        return in_step and self.balance > 0

    def lines(self, config: Config) -> list[str]:
        """What was chosen and why, for the head of a run."""
        machine = self.machine
        cores = f"{machine.usable_cores} of {machine.logical_cores} logical cores usable"
        if machine.cpu_quota is not None:
            cores += f", cgroup quota {machine.cpu_quota:g}"
        lines = [f"CPU: {machine.cpu_model} ({cores})"]
        if config.mode != "sequential":
            lines.append(self._workers_line(config))
        lines.append(
            f"Threads: {self.num_threads} | Precision: {self.precision} ({self.precision_reason}) | "
            f"Network: {self.engine} | Micro-batch: {self.micro_batch} | Layout: {config.hardware.memory_format}"
        )
        busy = (self.num_workers + self.num_learners) * self.num_threads
        spare = 1 if self.num_learners else 0  # of actors and learners some wait: one more than cores is good
        if busy > machine.allowed_cores + spare:
            flag = "--num-workers" if config.mode != "sequential" else "--num-threads"
            lines.append(
                f"Warning: {busy} busy threads on {machine.allowed_cores} cores get in each other's way; "
                f"{flag} {max(1, machine.usable_cores - self.num_learners)} would be faster."
            )
        return lines

    def _workers_line(self, config: Config) -> str:
        pinned = "pinned to cores" if self.cores[0] is not None else "not pinned"
        if self.num_learners:
            return (
                f"Actors: {self.num_workers}, learners: {self.num_learners} ({pinned}) | Environments: "
                f"{config.env.num_envs} in all | Batch: {config.unrolls_per_step} unrolls of {config.training.n_steps}"
            )
        reasons = {self.machine.usable_cores: "one per physical core", config.env.num_envs: "one per environment"}
        reason = reasons.get(self.num_workers, "set")
        gradients = "each worker's own, without locks" if config.algorithm == "a3c" else "shared memory"
        return (
            f"Workers: {self.num_workers} ({reason}, {pinned}) | Environments: {config.env.num_envs} in all | "
            f"Gradients: {gradients}"
        )


def resolve(config: Config) -> tuple[Config, Plan]:
    """Fill in how many workers there are, and plan the rest."""
    if config.mode == "parallel":
        config = with_workers(config, _num_workers(config, detection.detect()))
    return config, plan(config)


def compiled(config: Config, plan: Plan) -> Plan:
    """Compile the C code before any time counts, and once for all workers; the plan as it turns out to be possible."""
    from rl_cluster_benchmark.kernels import heads, native_network, pooling

    heads.available()
    pooling.available()
    architecture = "impala" if config.model.architecture == "auto" else config.model.architecture
    if plan.engine == "native" and not native_network.available(architecture):
        if config.hardware.engine == "native":
            raise UserError("hardware.engine = native needs AMX or AVX512-BF16 and a C compiler; see rlcb doctor.")
        return dataclasses.replace(plan, engine="torch")
    return plan


def plan(config: Config) -> Plan:
    machine = detection.detect()
    num_workers = _num_workers(config, machine)
    threads = config.hardware.num_threads or (machine.usable_cores if config.mode == "sequential" else 1)
    precision, reason = _precision(config, machine)
    num_learners = 0
    machines = config.num_machines
    if config.algorithm == "impala":
        if config.mode != "sequential":
            num_learners = 1 if config.impala.num_learners == "auto" else config.impala.num_learners
        share = -(-config.unrolls_per_step // (max(1, num_learners) * machines)) * config.training.n_steps
    else:
        everywhere = num_workers * machines
        share = -(-(config.batch_size if config.algorithm == "ppo" else config.rollout_size) // everywhere)
    is_small = config.env.game is None or config.hardware.device != "cpu"
    per_pass = config.hardware.micro_batch or (share if is_small else SAMPLES_PER_THREAD * threads)
    return Plan(
        machine,
        num_workers,
        threads,
        places(config.parallel.pin, num_workers + num_learners, threads, machine),
        precision,
        reason,
        _engine(config, threads, precision),
        min(per_pass, share),
        _balance(config, num_workers),
        num_learners,
    )


def _num_workers(config: Config, machine: Machine) -> int:
    if config.mode == "sequential":
        return 1
    most = machine.usable_cores
    if config.mode == "parallel" and config.parallel.num_envs_per_worker is None:
        most = min(most, config.env.num_envs)  # each has one at least
    return config.parallel.num_workers or most


def _precision(config: Config, machine: Machine) -> tuple[str, str]:
    """(the one to use, why)."""
    if config.env.game is None:
        return "float32", "small vectors"
    if config.hardware.precision != "auto":
        return config.hardware.precision, "set"
    if config.hardware.device != "cpu":
        return "float32", "auto is float32 on cuda"
    if machine.fast_bfloat16:
        return "bfloat16", f"the CPU has {machine.fast_bfloat16}"
    return "float32", "no AMX or AVX512-BF16"


def _engine(config: Config, threads: int, precision: str) -> str:
    """What should compute the network; whether native really can is known once it is compiled."""
    suits = {
        "precision bfloat16": precision == "bfloat16",
        "one thread per process": threads == 1,
        "hardware.device cpu": config.hardware.device == "cpu",
        "hardware.memory_format channels_last": config.hardware.memory_format == "channels_last",
        "the IMPALA-CNN or the Nature-CNN": config.env.game is not None and config.model.architecture != "mlp",
        "1 to 3 stages with channels in multiples of 16": config.model.architecture == "nature"
        or (
            len(config.model.channels) <= 3
            and all(channels % 16 == 0 and channels <= 256 for channels in config.model.channels)
        ),
        "model.hidden_size in multiples of 32": config.model.hidden_size % 32 == 0,
    }
    if config.hardware.engine == "native" and not all(suits.values()):
        missing = next(need for need, is_met in suits.items() if not is_met)
        raise UserError(f"hardware.engine = native needs {missing}; use auto or torch.")
    return "native" if config.hardware.engine != "torch" and all(suits.values()) else "torch"


def _balance(config: Config, num_workers: int) -> float:
    return 0.0 if num_workers == 1 else balance(config)


def balance(config: Config) -> float:
    """Return which part of their work several workers share."""
    return config.parallel.balance if config.parallel.balance is not None else BALANCE * (config.env.game is not None)


def learners_beside(actors: int, cores: int, config: Config) -> int:
    """As many as actors leave cores; where they leave none, and on two cores, they share the cores of actors.

    To learn from an image takes two thirds of its time or more. So there are learners for two thirds of the cores, or
    for the next smaller number that divides the batch: that stays as it is.
    """
    left = max(1, cores - actors)
    if config.env.game is None or (actors < cores and cores > FEW_CORES):
        return left
    unrolls = config.unrolls_per_learner(1)
    return max(left, *(n for n in range(1, -(-2 * cores // 3) + 1) if unrolls % n == 0))


def places(pin: str, num_workers: int, threads: int, machine: Machine) -> tuple[int | None, ...]:
    """A core for each worker. A run on some of the cores leaves the choice to the kernel: others may run beside it."""
    whole_machine = num_workers == machine.usable_cores == len(machine.physical_cores)
    fits = threads == 1 and num_workers <= len(machine.physical_cores)
    if fits and (pin == "always" or (pin == "auto" and whole_machine)):
        return machine.physical_cores[:num_workers]
    return (None,) * num_workers


def acting(config: Config, plan: Plan) -> tuple[torch.dtype, str]:
    """(precision, engine) of IMPALA's actors in parallel mode."""
    asked = config.impala.inference_precision
    precision = plan.precision if asked == "same" or config.env.game is None else asked
    return dtype(precision), plan.engine if precision == "bfloat16" else "torch"
