"""What may happen to `rlcb launch` itself and to its connections: each time the run ends in good order or goes on."""

import contextlib
import os
import pty
import signal
import subprocess
import time

import psutil
import pytest
from conftest import FOREVER, RLCB, ROOT, check_run, environment, finished, updates, wait_until
from test_hosts import launch_ssh, node_process


def everybody_of(output):
    """All processes of a run, on all hosts, except launchers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(output) in words and "launch" not in words:
            found.append(process)
    return found


def connection(process, number, side):
    """The ssh client of a node, or the server's process for its connection."""
    clients = [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "ssh"]
    (client,) = [child for child in clients if f"h{number}" in child.cmdline()]
    if side == "client":
        return client
    node = psutil.Process(node_process(str(output_of(client)), number - 1).pid)
    return next(parent for parent in node.parents() if parent.name() == "sshd")


def output_of(client):
    words = client.cmdline()[-1].split()
    return words[words.index("--output-dir") + 1]


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_killed_connection_is_made_again(side, hosts, processes, sshd, tmp_path):
    """The node at its other end ends with it, and a new attempt takes all three."""
    output, log = tmp_path / "run", tmp_path / "launch.log"
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", FOREVER), log)
    wait_until(lambda: updates(output) > 6, 90, "training", log)
    lonely = node_process(str(output), 2)
    connection(process, 3, side).kill()
    assert not psutil.wait_procs([lonely], timeout=30)[1], "the node outlived its connection"
    wait_until(lambda: "Restart 1 of 3, from the last checkpoint." in log.read_text(), 90, "the restart", log)
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 90, "going on", log)
    os.kill(process.pid, signal.SIGTERM)
    assert finished(process, 60, log) == 128 + signal.SIGTERM, log.read_text()
    check_run(output, nodes=3, state="interrupted")
    assert not everybody_of(output)


def test_a_link_that_comes_back(hosts, processes, sshd, tmp_path):
    """The link of a host is down for a while: the run goes on with all three, once they answer."""
    output, log = tmp_path / "run", tmp_path / "launch.log"
    args = ("--total-timesteps", FOREVER, "--set", "cluster.min_nodes=2")
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, *args), log)
    wait_until(lambda: updates(output) > 6, 90, "training", log)
    hosts.cut(3)
    wait_until(lambda: "error: " in log.read_text(), 40, "the end of the others", log)
    hosts.mend(3)
    wait_until(lambda: "Restart 1 of 3" in log.read_text(), 90, "the restart", log)
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 90, "going on", log)
    os.kill(process.pid, signal.SIGTERM)
    assert finished(process, 60, log) == 128 + signal.SIGTERM, log.read_text()
    check_run(output, nodes=3, state="interrupted")


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGHUP)])
def test_two_signals_at_once_are_one(numbers, hosts, processes, sshd, tmp_path):
    output, log = tmp_path / "run", tmp_path / "launch.log"
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", FOREVER), log)
    wait_until(lambda: updates(output) > 3, 90, "training", log)
    for number in numbers:
        os.kill(process.pid, number)
        time.sleep(0.0005)
    assert finished(process, 60, log) == 128 + numbers[0], log.read_text()
    check_run(output, nodes=3, state="interrupted")
    assert not everybody_of(output)


@pytest.mark.parametrize("how", ["terminal closed", "shell killed"])
def test_a_lost_terminal_saves_and_ends_all(how, hosts, processes, sshd, tmp_path):
    output, log = tmp_path / "run", tmp_path / "launch.log"
    call = launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", FOREVER)
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(ROOT)
        os.execve("/bin/bash", ["bash", "-c", '"$@"; true', "shell", *map(str, call)], environment())
    try:
        os.set_blocking(terminal, False)

        def training():
            with contextlib.suppress(BlockingIOError), log.open("ab") as file:
                file.write(os.read(terminal, 1 << 16))
            return updates(output) > 5

        wait_until(training, 90, "training", log)
        members = everybody_of(output)
        launchers = psutil.Process(shell).children(recursive=True)
        assert len(members) >= 3
        if how == "shell killed":
            os.kill(shell, signal.SIGKILL)
        else:
            os.close(terminal)
        _, alive = psutil.wait_procs([*members, *launchers], timeout=60)
        assert not alive
        check_run(output, nodes=3, state="interrupted")
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(output) in " ".join(process.cmdline()):
                    process.kill()
        os.waitpid(shell, 0)


@pytest.mark.parametrize("who", ["launcher", "everybody"])
def test_a_launcher_that_is_stopped_and_continued(who, hosts, processes, sshd, tmp_path):
    """Longer than cluster.timeout. The launcher alone does not matter; if all stand still, the run may start again."""
    output, log = tmp_path / "run", tmp_path / "launch.log"
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", FOREVER), log)
    wait_until(lambda: updates(output) > 6, 90, "training", log)
    stopped = [process.pid]
    if who == "everybody":
        stopped += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        for member in everybody_of(output):
            stopped += [member.pid, *(child.pid for child in member.children(recursive=True))]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(10 if number == signal.SIGSTOP else 0)
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 120, "going on", log)
    assert who == "everybody" or "Restart" not in log.read_text()
    os.kill(process.pid, signal.SIGTERM)
    assert finished(process, 60, log) == 128 + signal.SIGTERM, log.read_text()
    check_run(output, nodes=3, state="interrupted")


def test_values_of_variables_are_nowhere_to_be_read(hosts, processes, sshd, tmp_path):
    """Bug 12, with a real sshd: on no command line of either machine, not in the log, and yet they arrive."""
    output, log, secret = tmp_path / "run", tmp_path / "launch.log", "s3cret-'\"$(x)\n%é"
    call = launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", FOREVER)
    call[call.index("--env") : call.index("--env")] = ["--env", "RLCB_TEST_SECRET", "--env", "RLCB_TEST_LONG"]
    environ = {"RLCB_TEST_SECRET": secret, "RLCB_TEST_LONG": "0123456789" * 10_000}
    process = processes.start(call, log, **environ)
    seen = set()

    def training():
        for member in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                seen.add(" ".join(member.cmdline()))
        return updates(output) > 3

    wait_until(training, 90, "training", log)
    for rank in (0, 1, 2):
        there = node_process(str(output), rank).environ()
        assert {name: there[name] for name in environ} == environ
    os.kill(process.pid, signal.SIGTERM)
    assert finished(process, 60, log) == 128 + signal.SIGTERM, log.read_text()
    for text in (*seen, log.read_text()):
        assert "s3cret" not in text
        assert "0123456789" not in text
    doctor = [*RLCB, "doctor", "--cluster", "--hosts", "h1,h2", "--directory", ROOT, "--env", "PYTHONPATH", "--env",
              "RLCB_TEST_SECRET", *(word for option in sshd for word in ("--ssh-option", option))]  # fmt: skip
    environ = environment(**environ)
    done = subprocess.run(
        list(map(str, hosts.call(0, doctor))), cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s3cret" not in done.stdout + done.stderr
