"""What a process inherits from whoever started it, put in order before anything else.

Signals that are ignored stay so (see run/stop.py): that is how nohup asks for it. The rest is chance.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

from rl_cluster_benchmark.core.errors import UserError


def put_in_order() -> None:
    _open_closed_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked, a signal would never arrive
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, no child's exit status would ever be known
    os.umask(os.umask(0o077) & 0o077)  # whoever makes a file may use it
    with contextlib.suppress(OSError, ValueError):  # a run with hundreds of workers has thousands of open files
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_directory() -> None:
    try:
        os.getcwd()
    except OSError:
        raise UserError("The directory that this was started in has been removed; go to another with cd.") from None


def _open_closed_streams() -> None:
    """Closed by whoever started us, a stream becomes /dev/null: the next file opened would be taken for it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
