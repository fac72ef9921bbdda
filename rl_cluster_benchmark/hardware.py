"""What this machine has, what this process may use of it, and how a run should use that.

Detection reads Linux's own files and needs neither numpy nor torch, so that `prepare_process` can set the thread
counts before those libraries start.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.config_files import with_workers
from rl_cluster_benchmark.errors import UserError

if TYPE_CHECKING:
    import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
BALANCE = 0.5  # a core of half the speed of the others still finishes with them
SAMPLES_PER_THREAD = 64  # of a backward pass: their activations stay in one core's cache
FEW_CORES = 2  # for actors and learners: too few to split


@dataclass(frozen=True)
class Machine:
    cpu_model: str
    flags: frozenset[str]
    logical_cores: int  # of the machine
    allowed_cores: int  # logical cores that affinity lets this process use
    cpu_quota: float | None  # cores' worth of time that the cgroup allows
    usable_cores: int  # physical cores that this process may keep busy
    physical_cores: tuple[int, ...]  # one logical CPU of each physical core that affinity allows
    memory_bytes: int
    shm_bytes: int

    @property
    def fast_bfloat16(self) -> str | None:
        """The instruction set that multiplies bfloat16 faster than float32, if there is one."""
        names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
        return next((name for flag, name in names.items() if flag in self.flags), None)


@cache
def detect() -> Machine:
    allowed = sorted(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    physical = tuple({_siblings(cpu): cpu for cpu in reversed(allowed)}.values())[::-1]
    usable = len(physical) if quota is None else max(1, min(len(physical), math.floor(quota)))
    model, flags = _cpu_info()
    return Machine(
        cpu_model=model,
        flags=flags,
        logical_cores=os.cpu_count() or len(allowed),
        allowed_cores=len(allowed),
        cpu_quota=quota,
        usable_cores=usable,
        physical_cores=physical,
        memory_bytes=_memory_limit(),
        shm_bytes=_free_bytes("/dev/shm"),
    )


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
        through_gloo = config.mode == "parallel" and config.parallel.reduce == "gloo"
        return in_step and self.balance > 0 and not through_gloo

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
        gradients = {"a3c": "each worker's own, without locks"}
        return (
            f"Workers: {self.num_workers} ({reason}, {pinned}) | Environments: {config.env.num_envs} in all | "
            f"Gradients: {gradients.get(config.algorithm, config.parallel.reduce.replace('_', ' '))}"
        )


def resolve(config: Config) -> tuple[Config, Plan]:
    """Fill in how many workers there are, and plan the rest."""
    if config.mode == "parallel":
        config = with_workers(config, _num_workers(config, detect()))
    return config, plan(config)


def compiled(config: Config, plan: Plan) -> Plan:
    """Compile the C code before any time counts, and once for all workers; the plan as it turns out to be possible."""
    from rl_cluster_benchmark.kernels import heads, network, pooling

    heads.available()
    pooling.available()
    architecture = "impala" if config.model.architecture == "auto" else config.model.architecture
    if plan.engine == "native" and not network.available(architecture):
        if config.hardware.engine == "native":
            raise UserError("hardware.engine = native needs AMX or AVX512-BF16 and a C compiler; see rlcb doctor.")
        return dataclasses.replace(plan, engine="torch")
    return plan


def plan(config: Config) -> Plan:
    machine = detect()
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


def prepare_process(num_threads: int) -> None:
    """Set the threads of every numeric library together, and keep freed memory for the next tensor.

    The command line calls it before it imports anything that imports numpy or torch: OpenBLAS, MKL and OpenMP read
    their variables once, when they start.
    """
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)
    _keep_freed_memory()
    import torch

    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def check_device(name: str) -> None:
    """Say so if a CUDA device is asked for that is not there."""
    if name == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"hardware.device = {name}, but this torch sees no CUDA device; use cpu.")
    index = torch.device(name).index
    if index is not None and index >= torch.cuda.device_count():
        raise UserError(f"hardware.device = {name}, but there are {torch.cuda.device_count()} devices.")


def dtype(precision: str) -> torch.dtype:
    import torch

    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def acting(config: Config, plan: Plan) -> tuple[torch.dtype, str]:
    """(precision, engine) of IMPALA's actors in parallel mode."""
    asked = config.impala.inference_precision
    precision = plan.precision if asked == "same" or config.env.game is None else asked
    return dtype(precision), plan.engine if precision == "bfloat16" else "torch"


def _keep_freed_memory() -> None:
    """By default glibc maps every large tensor anew and unmaps it when freed, page faults included."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # not glibc: slower, not wrong


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    return _read(topology / "thread_siblings_list") or str(cpu)


def _cpu_info() -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name") or platform.processor() or platform.machine(), frozenset(
        fields.get("flags", "").split()
    )


def _cgroup_dirs(controller: str) -> list[Path]:
    """This process's cgroup and its ancestors, of version 2 or of a version 1 controller."""
    dirs: list[Path] = []
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup") if not controllers else Path("/sys/fs/cgroup", controller)
        if not controllers or controller in controllers.split(","):
            here = root / path.lstrip("/")
            dirs += [d for d in (here, *here.parents) if d == root or root in d.parents]
    return dirs


def _cgroup_cpu_quota() -> float | None:
    quotas = []
    for directory in _cgroup_dirs("cpu"):
        if (text := _read(directory / "cpu.max")) and not text.startswith("max"):
            quota, period = map(int, text.split())
            quotas.append(quota / period)
        quota_v1, period_v1 = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota_v1 and period_v1 and int(quota_v1) > 0:
            quotas.append(int(quota_v1) / int(period_v1))
    return min(quotas, default=None)


def _memory_limit() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for directory in _cgroup_dirs("memory"):
        texts = (_read(directory / name) for name in ("memory.max", "memory.limit_in_bytes"))
        limits += [int(text) for text in texts if text and text.isdigit()]
    return min(limits)


def _free_bytes(path: str) -> int:
    try:
        stat = os.statvfs(path)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
