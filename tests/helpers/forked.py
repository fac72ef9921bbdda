"""Commands without the seconds that every interpreter takes to import torch, scipy and matplotlib.

One process for all tests, the template, has imported what is installed, and nothing of the program itself. A command is
a fork of it: a process of its own with its own pid, streams, directory, environment and status, a child of the test,
that imports the program anew. So are the commands that it starts, and its server of workers. Tests of how a process
begins start an interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PROGRAM = "rl_cluster_benchmark"
HEAVY = (
    "torch", "torch.distributed", "torch.utils.serialization.config", "torch.utils.tensorboard",
    "matplotlib.pyplot", "matplotlib.backends.backend_agg", "scipy.optimize", "scipy.stats", "pydantic.main",
    "pydantic.plugin._loader", "jinja2", "psutil", "tqdm", "yaml", "faulthandler", "statistics",
)  # fmt: skip
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
MOST_BYTES = 2**20  # of a request
ROOM_FOR_WORDS = 4096  # of a command line, as others see it
PR_SET_CHILD_SUBREAPER = 36
EXECUTE_CHILD = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_template: tuple[int, socket.socket] | None = None
_kept: list[object] = []


class Command(subprocess.Popen[str]):
    """`python -m rl_cluster_benchmark ARGUMENTS`, forked from the template; it is what Popen is."""

    def _execute_child(self, *values: Any) -> None:
        given = _by_name(values)
        assert given["preexec_fn"] is None
        assert not given["shell"]
        pipes = [given[name] for name in PIPES]
        try:
            streams = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
            request = {
                "arguments": [str(arg) for arg in given["args"]],
                "directory": os.path.abspath(given["cwd"] or "."),
                "environment": dict(os.environ if given["env"] is None else given["env"]),
                "new_session": given["start_new_session"],
            }
            self.pid = _fork_from_template(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


def _by_name(values: tuple[Any, ...]) -> dict[str, Any]:
    """Name what Popen hands on to its method that starts the process."""
    return dict(zip(EXECUTE_CHILD, values, strict=True))


def _fork_from_template(request: dict[str, Any], streams: list[int]) -> int:
    """Return the pid of the command, which is a child of this process."""
    line = _connection()
    adopt = ctypes.CDLL(None).prctl
    adopt(PR_SET_CHILD_SUBREAPER, 1)  # the command loses its first parent, and we are the next
    try:
        socket.send_fds(line, [json.dumps(request).encode()], streams)
        pid = int(line.recv(100))
        while _parent_of(pid) not in (os.getpid(), None):
            time.sleep(0.001)
    finally:
        adopt(PR_SET_CHILD_SUBREAPER, 0)
    return pid


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _connection() -> socket.socket:
    """Start the template at the first command."""
    global _template
    if _template is None or _template[0] != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, kind, MOST_BYTES)
        with theirs:
            root = Path(__file__).parents[2]
            variables = os.environ | ONE_THREAD | {"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
            call = [sys.executable, __file__, " " * ROOM_FOR_WORDS]
            process = subprocess.Popen(call, stdin=theirs, cwd=root, env=variables)
        atexit.register(lambda: (ours.close(), process.wait()))
        _template = os.getpid(), ours
    return _template[1]


def _serve() -> None:
    """Be the template until the tests have ended."""
    line = socket.socket(fileno=os.dup(0))
    for name in HEAVY:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    # An interpreter that is told to write no bytecode would compile the program for each command.
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.path.abspath(".pytest_cache/bytecode")
    gc.collect()
    gc.freeze()
    while True:
        text, streams, _, _ = socket.recv_fds(line, MOST_BYTES, 3)
        if not text:
            return
        between = os.fork()
        if between:
            for stream in streams:
                os.close(stream)
            os.waitpid(between, 0)
            continue
        first_parent = os.getpid()
        heard, told = os.pipe()
        command = os.fork()
        if command:
            os.close(told)
            os.read(heard, 1)  # until it has the session that it is to have
            line.send(str(command).encode())
            os._exit(0)
        request = json.loads(text)
        if request["new_session"]:
            os.setsid()
        os.close(told)
        os.close(heard)
        while os.getppid() == first_parent:
            time.sleep(0.0005)
        line.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _end_with(partial(_be_command, request["arguments"], request["directory"], request["environment"]))


def _be_command(arguments: list[str], directory: str, environment: dict[str, str]) -> None:
    _show(sys.executable, "-m", PROGRAM, *arguments)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = directory
    sys.argv = ["", *arguments]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = _unbuffered(1, sys.stdout.encoding, "strict")
    sys.stderr = sys.__stderr__ = _unbuffered(2, sys.stderr.encoding, "backslashreplace")
    tempfile.tempdir = None
    _customize()
    util.spawnv_passfds, subprocess.Popen = _spawn, _Child
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


def _customize() -> None:
    """Look where PYTHONPATH says, and run the first sitecustomize.py there, as an interpreter does at its start."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    file = next((file for folder in folders if (file := Path(folder, "sitecustomize.py")).exists()), None)
    if file is not None:
        exec(compile(file.read_text(), file, "exec"), {"__name__": "sitecustomize"})


def _unbuffered(number: int, encoding: str, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding, errors, write_through=True)


def _spawn(path: bytes | str, arguments: list[Any], descriptors: list[int], start=util.spawnv_passfds) -> int:
    """Fork the server of workers too, as long as nothing runs in this process that a fork would lose."""
    if "multiprocessing.forkserver" not in arguments[-1] or len(os.listdir("/proc/self/task")) > 1:
        return start(path, arguments, descriptors)

    def serve() -> None:
        _show(*arguments)
        _forget(set(descriptors))
        _customize()
        exec(arguments[-1], {})

    return os.fork() or _end_with(serve)


class _Child(subprocess.Popen[Any]):
    """What a command starts: where that is a command, it is a fork too."""

    def _execute_child(self, *values: Any) -> None:
        given = _by_name(values)
        arguments = list(given["args"])
        if arguments[:3] != [sys.executable, "-m", PROGRAM]:
            return super()._execute_child(*values)
        pipes = [given[name] for name in PIPES]

        def begin() -> None:
            for number, stream in enumerate((pipes[0], pipes[3], pipes[5])):
                if stream not in (-1, number):
                    os.dup2(stream, number)
            if given["start_new_session"]:
                os.setsid()
            if given["preexec_fn"] is not None:
                given["preexec_fn"]()
            _forget(set())  # closes the pipe too
            variables = os.environ if given["env"] is None else given["env"]
            _be_command(arguments[3:], os.path.abspath(given["cwd"] or "."), dict(variables))

        heard, told = os.pipe()
        try:
            self.pid = os.fork() or _end_with(begin)
            self._child_created = True
            os.close(told)
            os.read(heard, 1)  # until it is what it was to be: its session, its cores
        finally:
            os.close(heard)
            self._close_pipe_fds(*pipes)


def _end_with(action: Callable[[], object]) -> NoReturn:
    """Do it in this new process, and end as an interpreter does, but for taking all modules apart."""
    status: object = 1
    try:
        action()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status if isinstance(status, int) else 1)


def _show(*words: str | bytes) -> None:
    """Say in /proc, and so in ps, what this process is."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _forget(descriptors: set[int]) -> None:
    """Be as new: what an interpreter would have that has just begun."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # What the process before this one does at its end is not for this one to do: temporary folders are in use.
    # And nothing that was its own may be collected here: it would close numbers that are now of other files.
    gc.freeze()
    _kept.extend([dict(weakref.finalize._registry), dict(sys.modules)])
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    for name in [name for name in sys.modules if name.partition(".")[0] == PROGRAM]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c"]
    util._finalizer_registry.clear()
    process._children = set()
    for one in (forkserver._forkserver, resource_tracker._resource_tracker):
        one.__init__()


if __name__ == "__main__":
    _serve()
