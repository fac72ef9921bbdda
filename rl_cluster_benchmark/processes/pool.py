"""A pool of worker processes: it starts them, watches them, and leaves none behind.

Workers are forked from a server process that has loaded what all of them need (see execution/preload.py); each may be
pinned to a core. The kernel kills the server when the parent is gone, and a worker when the server is gone, so not even
SIGKILL of the parent leaves a worker behind. The parent hears at once when a worker dies, and replaces it or ends all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Literal, Self

import psutil

from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import leave_orders_to_parent, orders_held_back
from rl_cluster_benchmark.core.timing import beat
from rl_cluster_benchmark.processes.child_process import how_it_ended
from rl_cluster_benchmark.processes.watchdog import Pulse, Watchdog
from rl_cluster_benchmark.profiling.attach import attach

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SERVER_NAME = "rlcb-server"  # name of the server process once it has loaded what workers need
GAME_VARIABLE, PARENT_VARIABLE = "RLCB_PRELOAD_GAME", "RLCB_PARENT"  # environment variables that the server reads
SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_STARTS = 0.1, 0.02
SECONDS_TO_LOAD = 120.0  # for the server; if it is not ready then, workers are started nevertheless
# Size of the pipes in which workers' messages wait for a busy parent, about a thousand updates: of all pipes together
# (Linux allows a user 16 times as much), and the largest and the smallest of one worker.
ALL_UNHEARD, MOST_UNHEARD, LEAST_UNHEARD = 2**22, 2**20, 2**16
SECONDS_TO_DIE = 10.0
SECONDS_TO_LISTEN = 5.0  # to what workers have sent, before a run ends with an error
LONGEST_FOLDER = 70  # characters of TMPDIR, so that a socket's path there stays below the limit of 107
IMPORTED_BY = os.getpid()  # in a worker: the server that it was forked from, which has imported this module


def hide_server() -> None:
    """Remove the file name of the socket that Python's fork server listens at, which SIGKILL would leave in /tmp.

    This process still reaches the socket through /proc, by a descriptor. If this version of Python stores the address
    in another way, the name stays for as long as this process lives.
    """
    server = getattr(forkserver, "_forkserver", None)
    address = getattr(server, "_forkserver_address", None)
    if not isinstance(address, str) or address.startswith(("\0", "/proc/")):
        return
    descriptor = os.open(address, os.O_PATH | os.O_CLOEXEC)
    server._forkserver_address = f"/proc/self/fd/{descriptor}"  # type: ignore[union-attr]
    remove = getattr(util, "_remove_temp_dir", None)
    for finalizer in list(getattr(util, "_finalizer_registry", {}).values()):
        if remove is not None and getattr(finalizer, "_callback", None) is remove:
            finalizer()  # remove Python's temporary folder now, not at the end of this process


def start_server(game: str | None) -> None:
    """Start the process that workers are forked from, for workers that play this game.

    Loading what they need takes seconds, so it is started before the workers are wanted.
    """
    os.environ[GAME_VARIABLE] = game or ""
    with contextlib.suppress(OSError):  # the pool tries again and reports the error
        _ensure_server()


def _ensure_server() -> None:
    forkserver.set_forkserver_preload(["rl_cluster_benchmark.execution.preload"])
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:  # a batch job's TMPDIR may be too long for a socket's path
        tempfile.tempdir = "/tmp"
    # Signals are blocked while the two processes start: Ctrl-C or a closed terminal would reach them before they ignore
    # it. The tracker comes first, because Python unblocks SIGINT and SIGTERM after it has started it.
    for server in (resource_tracker, forkserver):
        with orders_held_back():
            server.ensure_running()
    hide_server()  # at once, because this process may be killed at any moment


def _server_is_ready() -> bool:
    """Return whether the server has loaded what workers need.

    True also if it has ended or cannot be asked: starting a worker will then show the error.
    """
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    try:
        server = psutil.Process(pid)
        return pid is None or server.name() == SERVER_NAME or server.status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # it has ended, or no file can be opened
        return True


@dataclass(frozen=True)
class Ending:
    """The last that a worker says. Whatever else it sends is a message to whoever runs the pool."""

    how: Literal["finished", "wrong input", "failed", "crashed", "died"]
    text: str = ""


class WorkerPool:
    """Processes that each run `target(rank, connection, *args)`; use it as a context manager."""

    def __init__(
        self,
        target: Callable[..., None],
        num_workers: int,
        args: Sequence[Any],
        cores: Sequence[int | None],
        replace: Callable[[int, str], Sequence[Any] | None] | None = None,
        watchdog: float = 300.0,
    ) -> None:
        """Prepare the pool; the workers start when `messages` is called.

        `replace(rank, how)` is called for a worker that died, crashed, or made no progress for `watchdog` seconds. It
        returns the arguments of a worker to start in its place, or None to go on without, or raises the error that ends
        the run, as it does by default.
        """
        self._target, self._args, self._cores, self._replace = target, args, cores, replace or _end_the_run
        self.num_workers = num_workers
        self._watchdog = Watchdog(watchdog)
        self._bytes_unheard = max(LEAST_UNHEARD, min(ALL_UNHEARD // num_workers, MOST_UNHEARD))
        self._pulses: list[Pulse] = []
        self.connections: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        self._finished: set[int] = set()

    def _start_all(self, look: Callable[[], None]) -> None:
        """Start all workers; call `look` again and again meanwhile, since hundreds of them take a while."""
        with _told_as_failure("The workers"):
            _ensure_server()
        deadline = time.monotonic() + SECONDS_TO_LOAD
        while not _server_is_ready() and time.monotonic() < deadline:
            look()
            time.sleep(SECONDS_BETWEEN_STARTS)
        for rank in range(self.num_workers):
            process, connection, pulse = self._start(rank, self._args)
            self.processes.append(process)
            self.connections.append(connection)
            self._pulses.append(pulse)
            look()
            beat()

    def _start(self, rank: int, args: Sequence[Any]) -> tuple[ForkServerProcess, Connection, Pulse]:
        context = multiprocessing.get_context("forkserver")
        with _told_as_failure(f"Worker {rank}"), contextlib.ExitStack() as if_it_fails:
            ours, theirs = context.Pipe(duplex=False)
            if_it_fails.callback(ours.close)
            with theirs:
                with contextlib.suppress(OSError):  # refused to a user who has many pipes: it then keeps its size
                    fcntl.fcntl(theirs.fileno(), fcntl.F_SETPIPE_SZ, self._bytes_unheard)
                pulse = Pulse()
                if_it_fails.callback(pulse.close)
                call = (self._target, rank, theirs, self._cores[rank], pulse, tuple(args))
                process = context.Process(target=_main, args=call, name=f"rlcb-worker-{rank}", daemon=True)
                _ensure_server()
                process.start()
            if_it_fails.pop_all()
        return process, ours, pulse

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def messages(self, look: Callable[[], None], patience: float = SECONDS_BETWEEN_LOOKS) -> Iterator[tuple[int, Any]]:
        """Start the workers and yield their messages as (rank, message) until every worker has finished.

        Call `look` at least every `patience` seconds. Raise the error of the first worker that fails.
        """
        self._start_all(look)
        while len(self._finished) < self.num_workers:
            open_connections = [c for rank, c in enumerate(self.connections) if rank not in self._finished]
            for ready in multiprocessing.connection.wait(open_connections, timeout=patience):
                rank = self.connections.index(ready)  # type: ignore[arg-type]
                try:
                    said = self.connections[rank].recv()
                except (EOFError, OSError):  # at the end of a message, or in the middle of one
                    said = Ending("died", self._how_it_ended(rank))
                if not isinstance(said, Ending):
                    yield rank, said
                    continue
                try:
                    self._note(rank, said)
                except TrainingFailedError:
                    yield from self._said_before()
                    raise
            look()
            beat()
            for rank in self._watchdog.hung(self._pulses, but=self._finished):
                pid = self.processes[rank].pid or 0
                self._lost(rank, self._watchdog.sentence(self._pulses[rank].stack_of(pid)))

    def _note(self, rank: int, ending: Ending) -> None:
        """Note that a worker has ended; raise its error, or let it be replaced."""
        match ending.how:
            case "finished":
                self._finished.add(rank)
            case "wrong input":
                raise UserError(ending.text)
            case "failed":
                raise TrainingFailedError(ending.text)
            case "crashed":
                self._lost(rank, f"crashed:\n{ending.text}")
            case "died":
                self._lost(rank, ending.text)

    def _said_before(self) -> Iterator[tuple[int, Any]]:
        """Yield the messages, a checkpoint perhaps, that workers sent before the error that now ends the run."""
        deadline = time.monotonic() + SECONDS_TO_LISTEN
        for rank, connection in enumerate(self.connections):
            with contextlib.suppress(EOFError, OSError):
                while connection.poll() and time.monotonic() < deadline:
                    said = connection.recv()
                    if not isinstance(said, Ending):
                        yield rank, said

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(timeout=5)
        code = process.exitcode
        hint = " (is the machine out of memory? use fewer workers)" if code == -signal.SIGKILL else ""
        return how_it_ended(code) + hint

    def _lost(self, rank: int, how: str) -> None:
        args = self._replace(rank, how)
        process = self.processes[rank]
        process.kill()  # it may still be running
        if args is None:
            self._finished.add(rank)
            return
        process.join(timeout=SECONDS_TO_DIE)
        fresh = self._start(rank, args)  # if this fails, the pool still holds the old process, which __exit__ ends
        _bury(process)
        self.connections[rank].close()
        self._pulses[rank].close()
        self.processes[rank], self.connections[rank], self._pulses[rank] = fresh

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank, process in enumerate(self.processes):
            if error is None and rank in self._finished:
                process.join(timeout=10)
            if process.is_alive():
                process.kill()
        for process in self.processes:
            _bury(process)
        for connection in self.connections:
            connection.close()
        for pulse in self._pulses:
            pulse.close()


@contextlib.contextmanager
def _told_as_failure(who: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise TrainingFailedError(
            f"{who} could not be started ({error or 'the process that starts workers is gone'}); is the machine out of "
            "memory, of processes or of open files (ulimit -u, ulimit -n)? The last checkpoint is intact."
        ) from None


def _bury(process: ForkServerProcess) -> None:
    """Release a process that was killed; wait only SECONDS_TO_DIE, since one that waits for a dead disk cannot end."""
    process.join(timeout=SECONDS_TO_DIE)
    if process.exitcode is not None:
        process.close()
    else:  # make Python forget it, too: at exit it waits for all its children
        getattr(multiprocessing.process, "_children", set()).discard(process)


def end_of(name: str, how: str) -> TrainingFailedError:
    """Return the error that ends a run because a process died or crashed; `how` may hold the traceback."""
    comfort = "" if "\n" in how else "; the last checkpoint is intact, and --resume goes on from it."
    return TrainingFailedError(f"{name} {how}{comfort}")


def _end_the_run(rank: int, how: str) -> None:
    raise end_of(f"Worker {rank}", how)


def _main(
    target: Callable[..., None], rank: int, connection: Connection, core: int | None, pulse: Pulse,
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    """Run in a new worker process: set it up, call `target`, and report how it ended."""
    die_with_parent(IMPORTED_BY)
    name_process(f"rlcb-worker-{rank}")
    pulse.begin()
    leave_orders_to_parent()
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        attach(rank)
        target(rank, connection, *args)
        connection.send(Ending("finished"))
    except UserError as error:
        _say(connection, Ending("wrong input", str(error)))
    except TrainingFailedError as error:
        _say(connection, Ending("failed", str(error)))
    except BaseException:
        _say(connection, Ending("crashed", traceback.format_exc()))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    connection.close()
    os._exit(0)  # without the destructors of native libraries, which have nothing to save


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, the process with that id, is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def name_process(name: str) -> None:
    """Give this process a name for ps and top, up to 15 characters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])


def _say(connection: Connection, ending: Ending) -> None:
    with contextlib.suppress(OSError):
        connection.send(ending)
