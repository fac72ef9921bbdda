"""Repair of what a process inherits from the one that started it: streams, blocked signals, umask, limits.

Signals that the starter made this process ignore stay ignored (see core/stop.py): nohup does that on purpose.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

from rl_cluster_benchmark.core.errors import UserError


def put_in_order() -> None:
    """Repair this process's streams, signals, umask and limit of open files; called before anything else."""
    _open_closed_streams()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a blocked signal would never arrive
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, no child's exit status can be read
    os.umask(os.umask(0o077) & 0o077)  # the owner may always use the files that this process makes
    with contextlib.suppress(OSError, ValueError):  # a run with hundreds of workers has thousands of open files
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_directory() -> None:
    try:
        os.getcwd()
    except OSError:
        raise UserError("The directory that this was started in has been removed; go to another with cd.") from None


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, whose numbers the next opened files would get."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
