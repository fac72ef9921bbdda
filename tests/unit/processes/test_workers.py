"""Starting worker processes where something is in the way."""

import socket
import subprocess
import sys
import threading

import pytest
from helpers.commands import ROOT, environment

from rl_cluster_benchmark.cluster import store
from rl_cluster_benchmark.core.commentary import Commentary

POOL = """
import resource, sys
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.processes import pool as workers
def work(rank, connection):
    connection.send("at work")
if __name__ == "__main__":
    {before}
    try:
        with workers.WorkerPool(work, 8, (), (None,) * 8) as pool:
            for rank, message in pool.messages(lambda: None):
                print(message, flush=True)
    except TrainingFailedError as error:
        print(error, flush=True)
"""


def run_pool(tmp_path, before):
    (tmp_path / "pool.py").write_text(POOL.format(before=before))
    call = [sys.executable, tmp_path / "pool.py"]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_that_is_never_ready_is_not_waited_for(tmp_path):
    text = run_pool(tmp_path, "workers.SERVER_NAME, workers.SECONDS_TO_LOAD = 'not its name', 0.2")
    assert text == "at work\n" * 8


@pytest.mark.parametrize("spare", [-1, 3], ids=("for the look at the server", "for the pulse"))
def test_too_few_open_files_are_told_as_that(spare, tmp_path):
    """Whichever comes to the limit."""
    before = f"""workers._ensure_server()
    few = len(__import__('os').listdir('/proc/self/fd')) + {spare}
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))"""
    text = run_pool(tmp_path, before)
    assert "could not be started" in text
    assert "ulimit -n" in text


def test_what_goes_wrong_while_greeting_is_told(monkeypatch):
    """Not only what torch raises: a thread that just ended would be waited for until the time is up."""

    def fail(host, port, timeout):
        raise OSError("no more threads")

    def wait():
        ended.wait(0.05)

    ended = threading.Event()
    monkeypatch.setattr(store, "client", fail)
    with pytest.raises(OSError, match="no more threads"):
        store._greet("localhost", 1, wait)


def test_a_socket_that_nobody_reads_holds_up_nothing():
    """It cannot be opened again, so a long write to it would wait though there is some room."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = Commentary(ours.fileno())
        stream._is_stuck = True  # does not wait for room
        writer = threading.Thread(target=stream.write, args=(b"x" * 2**22,), daemon=True)
        writer.start()
        writer.join(20)
        assert not writer.is_alive()
