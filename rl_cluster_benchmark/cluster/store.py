"""The store that the nodes of a run meet at: a key-value server on the head (torch's TCPStore), and its clients."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from datetime import timedelta
from typing import Any

from rl_cluster_benchmark.cluster import network
from rl_cluster_benchmark.cluster.placement import Placement
from rl_cluster_benchmark.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.run.stop import Signals

SECONDS_BETWEEN_TRIES = 0.1
STORE_TIMEOUT = timedelta(seconds=30)  # of one question to the store


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked to stop
    """A signal came before training began."""


def connect(placement: Placement, deadline: float, signals: Signals) -> tuple[Any, int | None]:
    """(the store, this node's rank if it is known already). The head makes the store unless torchrun has."""
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
    try:
        return client(host, port, STORE_TIMEOUT), rank
    except RuntimeError as error:
        raise UserError(
            f"What listens at {host}:{port} is not the head of a run ({first_line(error)}); choose another "
            "--master-port."
        ) from None


def _serve(host: str, port: int) -> Any:
    """A store that listens at the head's address only, not at all of the machine's."""
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


def has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except Exception as error:  # torch's exceptions have no common base but RuntimeError
        raise TrainingFailedError(
            f"The head's store no longer answers ({first_line(error)}); did the head stop? Its output says why."
        ) from None


def wait_a_moment(deadline: float, signals: Signals, sentence_if_late: str) -> None:
    if signals.received is not None:
        raise Interrupted
    if time.monotonic() > deadline:
        raise TrainingFailedError(sentence_if_late)
    time.sleep(SECONDS_BETWEEN_TRIES)


def first_line(error: BaseException) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0][:200]
    return type(error).__name__
