"""Starting worker processes, watching them, and leaving none behind.

A worker is spawned, may be pinned to a core, and dies with its parent: the kernel kills it when the parent is gone, so
not even SIGKILL of the parent leaves one. The parent hears of a worker's end at once and ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from rl_cluster_benchmark.errors import TrainingFailedError, UserError

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 0.1


class WorkerPool:
    """Processes that each run `target(rank, connection, *args)`; use it as a context manager."""

    def __init__(self, target: Callable[..., None], num_workers: int, args: Sequence[Any], cores: Sequence[int | None]):
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        self._finished: set[int] = set()
        for rank in range(num_workers):
            ours, theirs = context.Pipe()
            call = (target, rank, theirs, cores[rank], os.getpid(), tuple(args))
            process = context.Process(target=_main, args=call, name=f"rlcb-worker-{rank}", daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def messages(self, look: Callable[[], None]) -> Iterator[tuple[int, Any]]:
        """(rank, message) as they come, until every worker has finished; calls `look` every tenth of a second.

        Raises the error of the first worker that fails.
        """
        while len(self._finished) < len(self.processes):
            open_connections = [c for rank, c in enumerate(self.connections) if rank not in self._finished]
            for ready in multiprocessing.connection.wait(open_connections, timeout=SECONDS_BETWEEN_LOOKS):
                rank = self.connections.index(ready)  # type: ignore[arg-type]
                try:
                    kind, content = self.connections[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._raise_end_of(rank)
                if kind == "finished":
                    self._finished.add(rank)
                elif kind == "wrong input":
                    raise UserError(content)
                elif kind == "failed":
                    raise TrainingFailedError(content)
                elif kind == "crashed":
                    raise TrainingFailedError(f"Worker {rank} crashed:\n{content}")
                else:
                    yield rank, content
            look()

    def _raise_end_of(self, rank: int) -> None:
        process = self.processes[rank]
        process.join(timeout=5)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            hint = " (is the machine out of memory? use fewer workers)" if -code == signal.SIGKILL else ""
        else:
            how, hint = f"ended with status {code}", ""
        raise TrainingFailedError(
            f"Worker {rank} {how}{hint}; the last checkpoint is intact, and --resume goes on from it."
        )

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
            process.join()
            process.close()
        for connection in self.connections:
            connection.close()


def _main(
    target: Callable[..., None], rank: int, connection: Connection, core: int | None, parent: int, args: tuple[Any, ...]
) -> None:
    """The life of a worker process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they may reach the whole group; the parent decides
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        target(rank, connection, *args)
        connection.send(("finished", None))
    except UserError as error:
        _report(connection, "wrong input", str(error))
    except TrainingFailedError as error:
        _report(connection, "failed", str(error))
    except BaseException:
        _report(connection, "crashed", traceback.format_exc())
    sys.stdout.flush()
    connection.close()
    os._exit(0)  # skip the destructors of native libraries: nothing is left to save


def _report(connection: Connection, kind: str, content: str) -> None:
    with contextlib.suppress(OSError):
        connection.send((kind, content))
