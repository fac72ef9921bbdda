"""When a run ends: enough steps, enough time, or somebody asks."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

STDERR = 2


class Signals:
    """The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 asks the run to end in good order; a second one ends it at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        name = signal.Signals(number).name
        # Not print(): the signal may arrive in the middle of one. And whoever read our output may be gone.
        with contextlib.suppress(OSError):
            os.write(STDERR, f"\n{name}: finishing and saving; once more ends at once.\n".encode())
