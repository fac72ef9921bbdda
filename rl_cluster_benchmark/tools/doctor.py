"""`rlcb doctor`: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.config.schema import PROCGEN_GAMES, Config, EnvConfig
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.machine import detection, planning

OK, WARNING, PROBLEM = "ok", "warning", "PROBLEM"
GIB = 2**30
ENOUGH_FILES = 1024
# package -> what it is for
OPTIONAL = {
    "matplotlib": "plots",
    "tensorboard": "TensorBoard logs",
    "imageio_ffmpeg": "videos as .mp4",
    "ray": "clusters run by Ray",
    "optuna": "hyperparameter search",
}


class Finding(NamedTuple):
    what: str
    status: str
    detail: str
    remedy: str = ""


def doctor() -> int:
    """Print the table; 1 if training could not run."""
    print(f"RL Cluster Benchmark {__version__}: checking this machine\n")
    worst = False
    for finding in findings():
        print(f"  {finding.what:<22} {finding.status:<8} {finding.detail}", flush=True)
        if finding.remedy:
            print(f"  {'':<22} {'':<8} -> {finding.remedy}", flush=True)
        worst |= finding.status == PROBLEM
    print(
        "\nTraining cannot run yet: see the lines marked PROBLEM." if worst else "\nReady to train: rlcb train --help"
    )
    return int(worst)


def findings() -> Iterator[Finding]:
    yield _python()
    yield from _torch()
    yield from _games()
    yield _kernels()
    yield from _cores()
    yield from _memory()
    yield _files()
    yield from _optional()


def _python() -> Finding:
    return Finding("Python", OK, f"{platform.python_version()} ({sys.executable})")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", PROBLEM, f"cannot be imported ({error})", "pip install -r requirements.txt")
        return
    threads, usable = torch.get_num_threads(), detection.detect().usable_cores
    yield Finding("torch", OK, f"{torch.__version__}, {threads} threads, {usable} will be used")


def _games() -> Iterator[Finding]:
    try:
        from rl_cluster_benchmark.env.environments import load_envpool, make_env

        load_envpool()
    except (UserError, ImportError) as error:
        yield Finding("Procgen", PROBLEM, "cannot be loaded", str(error))
        return
    import numpy as np

    for game in PROCGEN_GAMES:
        try:
            start = time.perf_counter()
            env = make_env(EnvConfig(name=game), range(2), num_threads=1)
            first = env.reset()
            step = env.step(np.array([1, 4], dtype=np.int32))
            milliseconds = 1e3 * (time.perf_counter() - start)
            if first.shape != (2, 64, 64, 3) or step.observations.dtype != np.uint8 or not first.any():
                yield Finding(game, PROBLEM, f"gives observations {first.shape} {step.observations.dtype}")
            else:
                yield Finding(game, OK, f"made and stepped in {milliseconds:.0f} ms")
        except Exception as error:  # whatever a native library throws belongs into the table
            yield Finding(game, PROBLEM, f"{type(error).__name__}: {error}", "pip install --force-reinstall envpool")


def _kernels() -> Finding:
    try:
        from rl_cluster_benchmark.kernels import build, native_network

        libraries = [library for precision in native_network.DTYPES if (library := build.load(precision)) is not None]
    except ImportError:
        return Finding("C kernels", WARNING, "need torch")
    except UserError as error:
        return Finding("C kernels", PROBLEM, str(error))
    for name, precision in ((library.variant.name, library.variant.precision) for library in libraries):
        wrong = [each for each in native_network.SOURCES if not native_network.available(each, precision)]
        if wrong:
            found = f"{name}: not used, for {', '.join(wrong)} it does not compute what torch does"
            return Finding("C kernels", PROBLEM, found, "set CC to another compiler")
    if libraries:
        names = " and ".join(library.variant.name for library in libraries)
        return Finding("C kernels", OK, f"{names}: checked against torch")
    return Finding("C kernels", WARNING, "not used: training is slower", "install a C compiler (apt-get install gcc)")


def _cores() -> Iterator[Finding]:
    machine = detection.detect()
    quota = "no cgroup limit" if machine.cpu_quota is None else f"cgroup limit {machine.cpu_quota:g}"
    yield Finding(
        "cores",
        OK,
        f"{machine.usable_cores} physical usable; {machine.logical_cores} logical, {machine.allowed_cores} allowed by "
        f"affinity, {quota}",
    )
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Finding("architecture", WARNING, platform.machine(), "use x86 to train with several processes")
    vector = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if name in machine.flags]
    status = OK if vector else WARNING
    yield Finding("CPU", status, machine.cpu_model, "" if vector else "no AVX2 or NEON: training will be slow")
    yield Finding("vector instructions", status, ", ".join(vector) or "none known")
    with contextlib.suppress(UserError):  # said of the C kernels
        plan = planning.plan(Config())
        yield Finding("precision", OK, f"{plan.precision} ({plan.precision_reason})")


def _memory() -> Iterator[Finding]:
    machine, disk = detection.detect(), shutil.disk_usage(os.curdir)
    for what, size, word, enough, remedy in (
        ("memory", machine.memory_bytes, "usable", 2, "fewer --num-envs"),
        (
            "/dev/shm",
            machine.shm_bytes,
            "free",
            0.25,
            "parallel mode needs it; in a container: docker run --shm-size=1g",
        ),
        ("disk here", disk.free, "free", 1, "checkpoints and logs need some; use --output-dir on another disk"),
    ):
        is_low = size / GIB < enough
        yield Finding(what, WARNING if is_low else OK, f"{size / GIB:.1f} GiB {word}", remedy if is_low else "")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft < ENOUGH_FILES
    return Finding("open files", WARNING if low else OK, f"{soft} (at most {hard})", "ulimit -n 4096" if low else "")


def _optional() -> Iterator[Finding]:
    for module, purpose in OPTIONAL.items():
        distribution = module.replace("_", "-")
        if importlib.util.find_spec(module) is None:
            yield Finding(distribution, "absent", f"optional, for {purpose}", f"pip install {distribution}")
        else:
            yield Finding(distribution, OK, f"{importlib.metadata.version(distribution)}, for {purpose}")
