"""An end for what may never end by itself."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from rl_cluster_benchmark.core import commentary


@contextlib.contextmanager
def limited(seconds: float, sentence: str) -> Iterator[None]:
    """A question to a store whose machine is gone may block for ever: then this process ends, with a word."""

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
