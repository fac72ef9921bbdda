"""The store at which the nodes of a run meet: a key-value server on the head (torch's TCPStore), and its clients."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from rl_cluster_benchmark.cluster import network
from rl_cluster_benchmark.cluster.placement import Placement
from rl_cluster_benchmark.core import commentary
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals

SECONDS_BETWEEN_TRIES = 0.1
STORE_TIMEOUT = timedelta(seconds=30)  # for one request to the store


def connect(placement: Placement, deadline: float, signals: Signals) -> tuple[Any, int | None]:
    """Return the store, and this node's rank if it is known yet; on the head, make the store unless torchrun has."""
    host, port, rank = placement.master_addr, placement.master_port, placement.rank
    if not placement.store_is_there and (rank == 0 or (rank is None and network.is_own_address(host, port))):
        try:
            return _serve(host, port), 0
        except OSError as error:
            if rank == 0 or error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"The head cannot listen at {host}:{port} ({error.strerror}); choose another --master-port, or "
                    "give an address of this machine with --master-addr."
                ) from None
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            break
        except OSError as error:
            own = " (an address of this machine itself)" if network.is_own_address(host, port) else ""
            wait_a_moment(
                deadline,
                signals,
                f"The head at {host}:{port}{own} did not answer in time ({error.strerror or error}); is it started, "
                "and is the port open between the machines?",
            )
    late = f"What listens at {host}:{port} did not greet in time: is it the head of a run?"
    return _greet(host, port, lambda: wait_a_moment(deadline, signals, late)), rank


def _greet(host: str, port: int, wait: Callable[[], None]) -> Any:
    """Return a client of the store; call `wait`, which looks at signals, until it is connected.

    A thread connects, because signals are not handled while torch's code waits.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def greet() -> None:
        try:
            answers.put(client(host, port, STORE_TIMEOUT))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=greet, name="rlcb-greeting", daemon=True).start()
    while answers.empty():
        wait()
    store = answers.get()
    if isinstance(store, RuntimeError):
        wait()  # raises if a signal came: then the head may have stopped for the same reason
        raise UserError(
            f"What listens at {host}:{port} is not the head of a run ({first_line(store)}); choose another "
            "--master-port."
        )
    if isinstance(store, Exception):
        raise store
    return store


def _serve(host: str, port: int) -> Any:
    """Return a new store that listens at the head's address only, not at all addresses of the machine."""
    import torch.distributed as dist

    address = network.resolve(host, port)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def client(host: str, port: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def prefixed(prefix: str, store: Any) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(prefix, store)


@contextlib.contextmanager
def told_if_silent() -> Iterator[None]:
    """Turn a store's error within the context into a TrainingFailedError: the store ends with the head's process."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        raise TrainingFailedError(
            f"The head's store no longer answers ({first_line(error)}); did the head stop? Its output says why."
        ) from None


def wait_a_moment(deadline: float, signals: Signals, sentence_if_late: str) -> None:
    """Sleep shortly; raise Interrupted if a signal came, and TrainingFailedError if it is later than the deadline."""
    signals.check()
    if time.monotonic() > deadline:
        raise TrainingFailedError(sentence_if_late)
    time.sleep(SECONDS_BETWEEN_TRIES)


def first_line(error: BaseException) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0][:200]
    return type(error).__name__


@contextlib.contextmanager
def limited(seconds: float, sentence: str) -> Iterator[None]:
    """End this process with an error message if the context takes longer than `seconds`.

    It is for calls of a store whose machine is gone, which may block for ever and cannot be interrupted.
    """

    def end() -> None:
        commentary.say(f"error: {sentence}\n")
        os._exit(1)

    alarm = threading.Timer(seconds, end)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
