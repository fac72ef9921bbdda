"""A node's process as the launcher sees it: it prints, it ends, it can be told to stop."""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rl_cluster_benchmark.processes.child_process import SECONDS_TO_DIE, ChildProcess

READY = "rlcb-ready-for-variables"
LINE_LENGTH = 1000  # of what is typed at a terminal, which holds lines of up to 4,095 bytes
# For an interpreter at the other end of ssh: read variables from the connection, where no command line shows them, and
# go on as the program in the arguments. The terminal's echo would send them back into the log. The word that says it is
# ready does not stand in the text itself: a shell that shows its commands (set -x) must not say it.
RECEIVE = f"""
import base64, json, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
settings = termios.tcgetattr(0) if os.isatty(0) else None
if settings:
    termios.tcsetattr(0, termios.TCSANOW, settings[:3] + [settings[3] & ~termios.ECHO] + settings[4:])
print("{READY[:9]}" + "{READY[9:]}", flush=True)
text = "".join(iter(lambda: sys.stdin.readline().strip(), ""))
if settings:
    termios.tcsetattr(0, termios.TCSANOW, settings)
os.environ.update(json.loads(base64.b64decode(text or sys.exit(1))))
os.execvp(sys.argv[1], sys.argv[1:])
"""

Lines = queue.SimpleQueue[tuple[str, str]]
"""(node, what it printed)."""


def take_lines(lines: Lines) -> Iterator[tuple[str, str]]:
    """Take (node, line) from the queue until it is empty."""
    while not lines.empty():
        yield lines.get()


class NodeProcess(Protocol):
    """The process of one node, wherever it runs."""

    name: str

    def poll(self) -> int | None: ...  # its exit status once it has ended
    def send(self, number: int) -> None: ...  # asks it by a signal to end in good order
    def kill(self) -> None: ...
    def close(self) -> None: ...  # waits for the rest of the output of a process that has ended


class LocalProcess(ChildProcess):
    """A child process with its output on a queue."""

    def __init__(
        self, name: str, call: Sequence[str], lines: Lines, environ: Mapping[str, str], **options: Any
    ) -> None:
        super().__init__(call, env=dict(environ), **options)
        self.name = name
        self._reader = threading.Thread(target=self._read, args=(lines,), name=f"rlcb-output-{name}", daemon=True)
        self._reader.start()

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # killed, but held by a disk that does not answer
            self.process.wait(SECONDS_TO_DIE)
        self._reader.join(timeout=5)
        super().close()

    def _read(self, lines: Lines) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stdout:
                self._heard(line.decode(errors="replace").rstrip(), lines)

    def _heard(self, line: str, lines: Lines) -> None:
        lines.put((self.name, line))


class SshProcess(LocalProcess):
    """A process on another machine, at the other end of `ssh -tt`: the terminal there dies with the connection."""

    def __init__(
        self, name: str, call: Sequence[str], lines: Lines, environ: Mapping[str, str], variables: Mapping[str, str]
    ) -> None:
        """Start the call; `variables`, if there are any, are sent to RECEIVE in it."""
        self._variables = dict(variables)
        super().__init__(name, call, lines, environ)

    def _heard(self, line: str, lines: Lines) -> None:
        said, mark, _ = line.partition(READY)
        if not (mark and self._variables):
            return super()._heard(line, lines)
        if said:
            super()._heard(said, lines)
        text = base64.b64encode(json.dumps(self._variables).encode())
        pieces = [text[start : start + LINE_LENGTH] for start in range(0, len(text), LINE_LENGTH)]
        self._variables = {}
        self._type(b"\n".join(pieces) + b"\n\n")

    def send(self, number: int) -> None:
        """Type Ctrl-C at that terminal: its output still reaches us while it ends."""
        self._type(b"\x03")

    def _type(self, text: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(text)
            self.process.stdin.flush()
