"""A flame graph of the run's Python code with py-spy, where it is installed: https://github.com/benfred/py-spy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SECONDS = 2
PATIENCE = 30.0  # seconds to write the picture


def py_spy() -> str | None:
    """Beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def record(pid: int, file: Path) -> str | None:
    """Look at a process and its children for some seconds; returns why there is no picture, or None."""
    program = py_spy()
    if program is None:
        return "py-spy is not installed (pip install py-spy)"
    call = [
        program, "record", "--pid", str(pid), "--subprocesses", "--duration", str(SECONDS), "--output", str(file),
        "--nonblocking",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            call, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS + PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy did not come to an end ({error})"
    if file.is_file():
        return None
    lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
    return f"py-spy failed ({lines[0].strip()}); it may need root or ptrace rights"
