"""An end for what may never end by itself."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def limited(seconds: float, sentence: str) -> Iterator[None]:
    """A question to a store whose machine is gone may block for ever: then this process ends, with a word."""

    def end() -> None:
        os.write(2, f"error: {sentence}\n".encode())
        os._exit(1)

    alarm = threading.Timer(seconds, end)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()
