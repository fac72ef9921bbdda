"""Signals that ask a run to end ("orders"), and how processes and their children handle them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType

from rl_cluster_benchmark.core import commentary

ORDERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # signals that ask a run to end
PR_SET_PDEATHSIG = 1
SECONDS_OF_ONE_ORDER = 1.0  # a terminal that closes, `timeout` or a scheduler may send the same order more than once


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked to stop
    """Raised when a signal that asks the run to end came before training began."""


class Signals:
    """Handles SIGINT, SIGTERM, SIGHUP and SIGUSR1: the first asks the run to end in good order, a later one kills it.

    "Later" means at least a second after the first signal to this process other than SIGHUP. SIGHUP itself never ends
    the run at once: it says that the terminal is gone, not that somebody is in a hurry. Signals that other machines
    received do not count either.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._ordered_at: float | None = None  # when this process itself received the first signal except SIGHUP
        self._previous: dict[int, object] = {}
        self._ignored: set[int] | None = None

    def install(self) -> None:
        """Catch the signals, except those that this process was started to ignore, as nohup does with SIGHUP."""
        if self._ignored is None:
            self._ignored = {number for number in ORDERS if signal.getsignal(number) == signal.SIG_IGN}
        for number in ORDERS:
            handler = signal.SIG_IGN if number in self._ignored else self._handle
            self._previous[number] = signal.signal(number, handler)
        commentary.install()
        atexit.register(self._deaf_at_the_end)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def receive(self, number: int) -> None:
        """Note that the run is to end because of this signal, which this machine or another one has received."""
        self.received = number

    def has_come(self) -> bool:
        """Return whether somebody has asked to end."""
        return self.received is not None

    @property
    def status(self) -> int:
        """Return the exit status of a command that has ended in good order: 128 + N after signal N, else 0."""
        return 0 if self.received is None else 128 + self.received

    def check(self) -> None:
        """Raise Interrupted if the run is to end; called while the run starts, when there is nothing to save."""
        if self.received is not None:
            raise Interrupted

    def _deaf_at_the_end(self) -> None:
        """Ignore the signals from now on: Python removes its handlers at exit, and a signal would change the status."""
        if self.received is not None:
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_news = self.received is None
        if is_news:
            self.receive(number)
        if number != signal.SIGHUP:
            now = time.monotonic()
            if self._ordered_at is None:
                self._ordered_at, is_news = now, True
            elif now - self._ordered_at >= SECONDS_OF_ONE_ORDER:
                os._exit(128 + number)
        if is_news:
            name = signal.Signals(number).name
            commentary.say(f"\n{name}: finishing and saving; once more, in a second or later, ends at once.\n")


def leave_orders_to_parent() -> None:
    """Ignore the signals in a worker: Ctrl-C reaches the whole process group, but the parent decides when to end."""
    for number in ORDERS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ORDERS)


@contextlib.contextmanager
def orders_held_back() -> Iterator[None]:
    """Block the signals within the context; a process started in it has them blocked until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ORDERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(number: int, *, told: Collection[int] = (signal.SIGTERM,)) -> Callable[[], None]:
    """Return a function for a new process to call: the kernel then sends it `number` when its parent has ended.

    The function also gives the signals in `told` their default effect, which the parent may have set to ignore.
    """
    prctl = ctypes.CDLL(None).prctl  # found before the fork: after it, little is safe to do
    parent = os.getpid()

    def settle() -> None:
        obey(*told)
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # the parent ended before the lines above
            os._exit(128 + number)

    return settle


def obey(*numbers: int) -> None:
    """Give signals their default effect, to end the process, in a child whose parent may have set them to ignore."""
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
