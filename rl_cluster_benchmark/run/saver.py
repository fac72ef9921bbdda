"""Saving in a thread beside the training, so that a disk that stalls for minutes does not hold up any machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

PATIENCE = 1.0  # seconds for which `save` waits for its thread; most saves are done by then


class Saver:
    """Writes one file after the other in a thread; of files that wait for their turn, only the newest is written."""

    def __init__(self) -> None:
        self.path: Path | None = None  # the file that is being written
        self._next: tuple[Path, Callable[[], None]] | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._has_warned = False

    def save(self, path: Path, write: Callable[[], None]) -> None:
        """Call `write` in the thread, once the current write has ended; raise the error of this or an earlier write.

        An error that comes after this call has returned is raised by the next call of `save` or `check`.
        """
        with self._lock:
            if self.path is not None and not self._has_warned:
                self._has_warned = True
                print(f"Warning: the disk has not taken {self.path} yet; training goes on meanwhile.", flush=True)
            self._next = path, write
            is_idle = self.path is None
            self.path = self.path or path
        if is_idle:
            self._thread = threading.Thread(target=self._write, name="rlcb-saver", daemon=True)
            self._thread.start()
            self._thread.join(PATIENCE)
        self.check()

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until everything is written or a write has failed."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        while True:
            with self._lock:
                if self._next is None or self._error is not None:
                    self.path = None
                    return
                (self.path, write), self._next = self._next, None
            try:
                write()
            except Exception as error:
                self._error = error
