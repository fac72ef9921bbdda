"""Detection of what this process may use of the machine: cores, instruction sets, memory."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    cpu_model: str
    flags: frozenset[str]
    logical_cores: int  # all of the machine's
    allowed_cores: int  # logical cores that affinity lets this process use
    cpu_quota: float | None  # cores' worth of time that the cgroup allows
    usable_cores: int  # physical cores that this process may keep busy
    physical_cores: tuple[int, ...]  # one logical CPU of each physical core that affinity allows
    memory_bytes: int
    shm_bytes: int

    def __str__(self) -> str:
        return f"{self.cpu_model} ({self.usable_cores} of {self.logical_cores} logical cores usable)"

    @property
    def fast_bfloat16(self) -> str | None:
        """Return the name of the instruction set that multiplies bfloat16 faster than float32, or None."""
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


def _siblings(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    return _read(topology / "thread_siblings_list") or str(cpu)


def _cpu_info() -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name") or platform.processor() or platform.machine(), frozenset(
        fields.get("flags", fields.get("Features", "")).split()  # of x86, of ARM
    )


def _cgroup_dirs(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and its ancestors, of version 2 or of a version 1 controller."""
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
