"""A deadline for calls that may block for ever: it ends the process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from rl_cluster_benchmark.core import commentary


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
