"""Commands that stand in for ssh, srun, sbatch and the like: in a folder in front of PATH, with notes of each call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# ssh [options] HOST COMMAND: a shell on this machine, with a terminal that goes when the connection does. If there is a
# file `fail`, the next node does not start; a host with a file of its name is gone.
SSH = """\
#!{python}
import json, os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # on another machine nobody knows what was ignored here
here = os.path.dirname(os.path.realpath(__file__))
with open(os.path.join(here, "ssh.calls"), "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if "-tt" in sys.argv and os.path.exists(os.path.join(here, "fail")):
    os.unlink(os.path.join(here, "fail"))
    sys.exit("ssh: no route to host")
if any(os.path.exists(os.path.join(here, word)) for word in sys.argv[1:-1]):
    sys.exit(255)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["bash", "-c", sys.argv[-1]])))
"""
NOTE = """\
#!{python}
import json, os, sys
here = os.path.dirname(os.path.realpath(__file__))
with open(os.path.join(here, os.path.basename(__file__) + ".calls"), "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
"""


class StandIns:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, body: str = NOTE) -> None:
        tool = self.folder / name
        tool.write_text(body.replace("{python}", sys.executable))
        tool.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of each call so far."""
        notes = self.folder / f"{name}.calls"
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []

    @property
    def path(self) -> str:
        return f"{self.folder}:{os.environ['PATH']}"
