"""Plans how a run uses the machine: workers, threads, precision and micro-batch. Every `auto` is decided here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_cluster_benchmark.config.config_files import with_changes, with_workers
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.kernels import build
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.machine.detection import Machine
from rl_cluster_benchmark.machine.process import dtype

if TYPE_CHECKING:
    import torch

BALANCE = 0.5  # share of a minibatch that goes to free workers: a core of half the others' speed finishes with them
SAMPLES_PER_THREAD = 64  # of a pass forward and backward: their activations stay in one core's cache
FEW_CORES = 2  # too few to give actors and learners cores of their own


@dataclass(frozen=True)
class Plan:
    """How a run uses this machine: what the config asks for, with every `auto` decided."""

    machine: Machine
    num_workers: int
    num_threads: int  # of each process that computes
    cores: tuple[int | None, ...]  # the core that each worker is pinned to, or None
    precision: str
    precision_reason: str
    engine: str  # what computes the network: native or torch
    micro_batch: int
    balance: float  # share of a minibatch that goes to whichever worker is free
    variant: str = ""  # of the C code, once it is loaded
    num_learners: int = 0  # IMPALA's, outside sequential mode; num_workers then counts its actors

    def shares_work(self, config: Config) -> bool:
        """Return whether the workers share the work of minibatches, and with it one set of parameters."""
        return config.traits.is_in_step and not config.is_sequential and self.balance > 0

    def lines(self, config: Config) -> list[str]:
        """Return the lines that say at the start of a run what was chosen and why."""
        machine = self.machine
        cores = f"{machine.usable_cores} of {machine.logical_cores} logical cores usable"
        if machine.cpu_quota is not None:
            cores += f", cgroup quota {machine.cpu_quota:g}"
        lines = [f"CPU: {machine.cpu_model} ({cores})"]
        if not config.is_sequential:
            lines.append(self._workers_line(config))
        lines.append(
            f"Threads: {self.num_threads} | Precision: {self.precision} ({self.precision_reason}) | "
            f"Network: {self.engine_line} | Micro-batch: {self.micro_batch} | Layout: {config.hardware.memory_format}"
        )
        busy = (self.num_workers + self.num_learners) * self.num_threads
        spare = 1 if self.num_learners else 0  # some actors and learners wait: one more than there are cores is good
        if busy > machine.allowed_cores + spare:
            flag = "--num-workers" if not config.is_sequential else "--num-threads"
            lines.append(
                f"Warning: {busy} busy threads on {machine.allowed_cores} cores get in each other's way; "
                f"{flag} {max(1, machine.usable_cores - self.num_learners)} would be faster."
            )
        return lines

    @property
    def engine_line(self) -> str:
        return f"{self.engine} ({self.variant})" if self.variant else self.engine

    def _workers_line(self, config: Config) -> str:
        pinned = "pinned to cores" if self.cores[0] is not None else "not pinned"
        if self.num_learners:
            return (
                f"Actors: {self.num_workers}, learners: {self.num_learners} ({pinned}) | Environments: "
                f"{config.env.num_envs} in all | Batch: {config.unrolls_per_step} unrolls of {config.training.n_steps}"
            )
        reasons = {self.machine.usable_cores: "one per physical core", config.env.num_envs: "one per environment"}
        reason = reasons.get(self.num_workers, "set")
        gradients = "each worker's own, without locks" if config.traits.is_lock_free else "shared memory"
        return (
            f"Workers: {self.num_workers} ({reason}, {pinned}) | Environments: {config.env.num_envs} in all | "
            f"Gradients: {gradients}"
        )


def resolve(config: Config) -> tuple[Config, Plan]:
    """Return the config with the number of workers filled in, and the plan for it."""
    if config.is_parallel:
        config = with_workers(config, _num_workers(config, detection.detect()))
    return config, plan(config)


def with_split(config: Config, measure: Callable[[int], tuple[int, int]]) -> Config:
    """Return the config with IMPALA's actors, then in parallel.num_workers, and its learners.

    `measure` gives the best (actors, learners) of so many cores, where nothing else decides.
    """
    cores = detection.detect().usable_cores
    actors: int | str = config.impala.num_actors or config.parallel.num_workers or "auto"
    learners: int | str = config.impala.num_learners
    is_measured = config.impala.split == "measured"
    if not isinstance(actors, int):
        if isinstance(learners, int):
            actors = max(1, cores - learners)
        elif cores <= FEW_CORES:
            actors = 1
        else:
            (actors, learners), is_measured = measure(cores), True
    per_actor = config.parallel.num_envs_per_worker
    num_envs = actors * per_actor if per_actor is not None else config.env.num_envs  # of all machines, if several
    if not isinstance(learners, int):
        machines = config.num_machines if per_actor is None else 1
        learners = max(1, min(learners_beside(actors, cores, config), num_envs // machines))
    decided: dict[str, object] = {
        "impala.num_actors": None,
        "impala.num_learners": learners,
        "impala.split": "measured" if is_measured else "given",
        "parallel.num_workers": actors,
    }
    if config.is_parallel:  # machines that meet find out together how many environments they have
        decided["env.num_envs"] = num_envs
    return with_changes(config, decided, source="config")


def on_machines(config: Config, num_nodes: int, num_workers: int, num_learners: int, num_envs: int | None) -> Config:
    """Return the config for this many machines, with so many workers and learners in all.

    A resumed run keeps its `num_envs` environments, whatever number of workers shares them.
    """
    changes: dict[str, object] = {"cluster.num_workers": num_nodes, "mode": "distributed"}
    if config.cluster.min_nodes is not None:
        changes["cluster.min_nodes"] = min(config.cluster.min_nodes, num_nodes)
    if (per_worker := config.parallel.num_envs_per_worker) is not None:
        changes |= {"env.num_envs": num_envs or num_workers * per_worker, "parallel.num_envs_per_worker": None}
    agreed = with_changes(config, changes, source="this cluster")
    if agreed.env.num_envs < num_workers:
        raise UserError(
            f"{agreed.env.num_envs} environments cannot be shared by the {num_workers} workers of "
            f"{num_nodes} machines; use more --num-envs, or fewer --workers-per-node."
        )
    if agreed.env.num_envs < num_learners:
        raise UserError(
            f"The {num_learners} learners of {num_nodes} machines need as many environments, but there are "
            f"{agreed.env.num_envs}; use more --num-envs, or fewer impala.num_learners."
        )
    return agreed


def on_one_of_them(config: Config, num_workers: int, num_learners: int) -> tuple[Config, Plan]:
    """Return the config of all machines with one machine's own numbers of workers and learners, and the plan for it."""
    own: dict[str, object] = {"parallel.num_workers": num_workers}
    if num_learners:
        own["impala.num_learners"] = num_learners
    config = with_changes(config, own, source="this cluster")
    return config, plan(config)


def compiled(config: Config, plan: Plan) -> Plan:
    """Compile the C code, once for all workers, and return the plan with the variant that computes the network.

    That is the fastest one; torch is the engine if there is none.
    """
    from rl_cluster_benchmark.kernels import choice, heads

    heads.available()
    precisions = _precisions_in_c(config.hardware.precision, plan.num_threads)
    if plan.engine == "torch":
        if (variant := build.named()) and not precisions and _suits_c(config):
            threads = " and one thread per process (--num-threads 1)" if variant.precision == "bfloat16" else ""
            needs = f"hardware.precision {variant.precision} or auto{threads}"
            raise UserError(f"RLCB_KERNELS = {variant.name} needs {needs}; hardware.engine=torch does without.")
        return plan
    model = config.model
    architecture = "impala" if model.architecture == "auto" else model.architecture
    found = choice.choose(architecture, tuple(model.channels), model.hidden_size, tuple(precisions))
    if found is not None:
        reason = found.reason or plan.precision_reason
        return dataclasses.replace(plan, variant=found.variant, precision=found.precision, precision_reason=reason)
    if config.hardware.engine == "native":
        raise UserError("hardware.engine = native needs a C compiler, or a wheel with compiled code; see rlcb doctor.")
    precision, reason = _precision(config, plan.machine, [])
    return dataclasses.replace(plan, engine="torch", precision=precision, precision_reason=reason)


def plan(config: Config) -> Plan:
    """Return how a run with this config uses this machine."""
    machine = detection.detect()
    num_workers = _num_workers(config, machine)
    threads = config.hardware.num_threads or (machine.usable_cores if config.is_sequential else 1)
    in_c = _precisions_in_c(config.hardware.precision, threads)
    engine = _engine(config, in_c)
    precision, reason = _precision(config, machine, in_c if engine == "native" else [])
    num_learners = 0
    machines = config.num_machines
    if config.traits.has_actors:
        if not config.is_sequential:
            num_learners = 1 if config.impala.num_learners == "auto" else config.impala.num_learners
        share = -(-config.unrolls_per_step // (max(1, num_learners) * machines)) * config.training.n_steps
    else:
        everywhere = num_workers * machines
        share = -(-(config.batch_size if config.traits.has_minibatches else config.rollout_size) // everywhere)
    is_small = not config.env.has_images or config.hardware.device != "cpu"
    per_pass = config.hardware.micro_batch or (share if is_small else SAMPLES_PER_THREAD * threads)
    return Plan(
        machine,
        num_workers,
        threads,
        places(config.parallel.pin, num_workers + num_learners, threads, machine),
        precision,
        reason,
        engine,
        min(per_pass, share),
        _balance(config, num_workers),
        num_learners=num_learners,
    )


def _num_workers(config: Config, machine: Machine) -> int:
    if config.is_sequential:
        return 1
    most = machine.usable_cores
    if config.is_parallel and config.parallel.num_envs_per_worker is None:
        most = min(most, config.env.num_envs)  # each worker needs at least one environment
    return config.parallel.num_workers or most


def _precision(config: Config, machine: Machine, in_c: Sequence[str]) -> tuple[str, str]:
    """Return the precision to use and the reason for it, with C code in these precisions, or else torch."""
    if not config.env.has_images:
        return "float32", "small vectors"
    if config.hardware.precision != "auto":
        return config.hardware.precision, "set"
    if config.hardware.device != "cpu":
        return "float32", "auto is float32 on cuda"
    if in_c:
        return in_c[0], "the network in C computes in it"
    if machine.fast_bfloat16:
        return "bfloat16", f"the CPU has {machine.fast_bfloat16}"
    return "float32", "no AMX or AVX512-BF16"


def _precisions_in_c(asked: str, threads: int) -> list[str]:
    """Return the precisions in which C code may compute: float32, and bfloat16 in one thread on CPUs with AMX."""
    named = build.named()
    is_possible = {
        "float32": named is None or named.precision == "float32",
        "bfloat16": threads == 1 and bool(build.wanted("bfloat16")),
    }
    return [precision for precision in is_possible if is_possible[precision] and asked in ("auto", precision)]


def _engine(config: Config, in_c: Sequence[str]) -> str:
    """Return what is to compute the network: native or torch. Whether native works is known only after compilation."""
    needs = {"hardware.precision float32 or auto, or AMX and one thread per process": bool(in_c), **_needs_of_c(config)}
    if config.hardware.engine == "native" and not all(needs.values()):
        missing = next(need for need, is_met in needs.items() if not is_met)
        raise UserError(f"hardware.engine = native needs {missing}; use auto or torch.")
    return "native" if config.hardware.engine != "torch" and all(needs.values()) else "torch"


def _suits_c(config: Config) -> bool:
    return config.hardware.engine != "torch" and all(_needs_of_c(config).values())


def _needs_of_c(config: Config) -> dict[str, bool]:
    """Return what the C code needs whatever its precision, and whether the config has it."""
    return {
        "hardware.device cpu": config.hardware.device == "cpu",
        "hardware.memory_format channels_last": config.hardware.memory_format == "channels_last",
        "the IMPALA-CNN or the Nature-CNN": config.env.has_images and config.model.architecture != "mlp",
        "1 to 4 stages with channels in multiples of 16": config.model.architecture == "nature"
        or (
            len(config.model.channels) <= 4
            and all(channels % 16 == 0 and channels <= 256 for channels in config.model.channels)
        ),
        "model.hidden_size in multiples of 32": config.model.hidden_size % 32 == 0,
    }


def _balance(config: Config, num_workers: int) -> float:
    return 0.0 if num_workers == 1 else balance(config)


def balance(config: Config) -> float:
    """Return which share of a minibatch goes to whichever worker is free, if there are several workers."""
    return config.parallel.balance if config.parallel.balance is not None else BALANCE * config.env.has_images


def learners_beside(actors: int, cores: int, config: Config) -> int:
    """Return how many learners run beside this many actors: one on every core that the actors leave free.

    Where they leave none, and on two cores, learners of images share cores with actors. Learning from an image takes
    two thirds of the time that is spent on it or more, so there are then learners for up to two thirds of the cores:
    the largest number that divides the unrolls of a batch, so that its size stays the same.
    """
    left = max(1, cores - actors)
    if not config.env.has_images or (actors < cores and cores > FEW_CORES):
        return left
    unrolls = config.unrolls_per_learner(1)
    return max(left, *(n for n in range(1, -(-2 * cores // 3) + 1) if unrolls % n == 0))


def places(pin: str, num_workers: int, threads: int, machine: Machine) -> tuple[int | None, ...]:
    """Return the core that each worker is pinned to, or None for each.

    With `auto`, a run that does not use the whole machine pins nothing, since other runs may use the same cores.
    """
    whole_machine = num_workers == machine.usable_cores == len(machine.physical_cores)
    fits = threads == 1 and num_workers <= len(machine.physical_cores)
    if fits and (pin == "always" or (pin == "auto" and whole_machine)):
        return machine.physical_cores[:num_workers]
    return (None,) * num_workers


def acting(config: Config, plan: Plan) -> tuple[torch.dtype, str]:
    """Return the precision and the engine of IMPALA's actors outside sequential mode."""
    asked = config.impala.inference_precision
    precision = plan.precision if asked == "same" or not config.env.has_images else asked
    return dtype(precision), plan.engine if _precisions_in_c(precision, plan.num_threads) else "torch"
