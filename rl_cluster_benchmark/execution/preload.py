"""Imported once by the process that workers are forked from: what all of them need is loaded once, and shared.

torch, EnvPool and Procgen's images take some 500 MB; a forked worker shares those pages until it writes to them.
Forking is safe because this process has one thread: it computes nothing, closes the environment that made Procgen load
its images, and ends the threads that Qt used for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.stop import leave_orders_to_parent
from rl_cluster_benchmark.processes.pool import (
    GAME_VARIABLE,
    PARENT_VARIABLE,
    SERVER_NAME,
    die_with_parent,
    name_process,
)

QT_POOL, QT_WAIT = "_ZN11QThreadPool14globalInstanceEv", "_ZN11QThreadPool11waitForDoneEi"


def _load() -> None:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    leave_orders_to_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # workers compute on the CPU, and a CUDA context starts threads
    from rl_cluster_benchmark.machine import process

    process.prepare_process(1)
    from rl_cluster_benchmark.config.schema import EnvConfig
    from rl_cluster_benchmark.env.environments import load_envpool, make_env
    from rl_cluster_benchmark.execution import loop  # noqa: F401
    from rl_cluster_benchmark.kernels import heads, native_network

    with contextlib.suppress(UserError):  # the parent says so
        heads.available()
        for architecture, precision in itertools.product(native_network.SOURCES, native_network.DTYPES):
            native_network.available(architecture, precision)
    if game := os.environ.get(GAME_VARIABLE):
        load_envpool()
        qt = _qt_core()
        if qt is not None:
            make_env(EnvConfig(name=game), [0], num_threads=1)
            _end_qt_threads(qt)
    gc.collect()
    gc.freeze()  # the collector would write to every object, and so copy every page


def _qt_core() -> ctypes.CDLL | None:
    """Qt as it is loaded in this process; without it, nothing that starts its threads is done here."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "Qt5Core" in line or "Qt6Core" in line}
    for path in paths:
        library = ctypes.CDLL(path)
        if hasattr(library, "_ZN11QThreadPool14globalInstanceEv") and hasattr(
            library, "_ZN11QThreadPool11waitForDoneEi"
        ):
            return library
    return None


def _end_qt_threads(qt: ctypes.CDLL) -> None:
    """QThreadPool::globalInstance()->waitForDone(-1): a forked worker would wait for its idle threads for ever."""
    global_instance, wait_for_done = getattr(qt, QT_POOL), getattr(qt, QT_WAIT)
    global_instance.restype = ctypes.c_void_p
    wait_for_done(ctypes.c_void_p(global_instance()), -1)


try:
    _load()
finally:
    name_process(SERVER_NAME)  # ready: the parent waits for it
