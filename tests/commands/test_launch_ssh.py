"""`rlcb launch ssh` with an ssh that stands in: variables that nobody else may read, hosts that are none."""

import contextlib
import os
import signal
import subprocess
import threading
import time

import psutil
import pytest
from helpers.commands import ROOT, environment, rlcb
from helpers.forked import Command
from helpers.machines import FOREVER, TINY
from helpers.stand_ins import SSH, StandIns

from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.launch.ssh import Host, read_hosts


@pytest.fixture
def tools(needs_pty, tmp_path):
    tools = StandIns(tmp_path / "bin")
    tools.add("ssh", SSH)
    return tools


def command_lines():
    """Of all processes, as anybody can read them."""
    lines = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.add(" ".join(process.cmdline()))
    return lines


def test_no_value_of_a_variable_stands_on_a_command_line(tools, tmp_path):
    """Bug 12: --env NAME; not on this machine, not on the other, not in the log, and yet it arrives as it was."""
    secret, long = "s3cret-'\"$(x)\n\\é%", "0123456789" * 10_000
    environ = environment() | {"PATH": tools.path, "RLCB_TEST_SECRET": secret, "RLCB_TEST_LONG": long}
    call = ["launch", "ssh", "--hosts", "localhost", "--directory", ROOT, "--env", "RLCB_TEST_SECRET", "--env",
            "RLCB_TEST_LONG", "--env", "RLCB_TEST_ABSENT", "--activate", "echo prepared && set -x", "--", "train",
            *TINY, "--workers-per-node", 1, "--master-port", free_port(), "--total-timesteps", FOREVER,
            "--output-dir", tmp_path / "run"]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as file:
        launcher = Command(
            call, cwd=tmp_path, env=environ, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    try:
        deadline, seen = time.monotonic() + 120, set()
        while "Output: " not in log.read_text():
            seen |= command_lines()
            assert launcher.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        nodes = [p for p in psutil.Process(launcher.pid).children(recursive=True) if "train" in p.cmdline()[:4]]
        assert nodes[0].environ()["RLCB_TEST_SECRET"] == secret
        assert nodes[0].environ()["RLCB_TEST_LONG"] == long
        assert "RLCB_TEST_ABSENT" not in nodes[0].environ()
        for text in (*seen, *command_lines(), str(tools.calls("ssh")), log.read_text()):
            assert "s3cret" not in text
            assert len(text) < 50_000, "nor in another form: the long one would show"
            assert "0123456789" not in text
        assert "[localhost] prepared" in log.read_text()
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        with contextlib.suppress(psutil.Error):
            for member in psutil.Process(launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    member.kill()
        launcher.kill()
        launcher.wait()


ODD_HOSTS = (
    "-oProxyCommand=touch${IFS}x",
    "me@-oProxyCommand=touch", "$(touch${IFS}x)", "`id`", "a;touch", "a'b", 'a"b', "a|b",
    "@", "a\x1b]0;x\x07", "a addr=-oX", "a addr=$(x)", "a addr=", "a workers=\u00b2", "a workers=0", "a@", "a slots=4",
)  # fmt: skip


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_a_host_is_never_an_option_or_a_command(host, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"good\n{host}\n")
    for text in (str(file), f"good,{host}"):
        with pytest.raises(UserError, match="is not understood") as error:
            read_hosts(text)
        assert str(error.value).isprintable()


def test_an_odd_host_is_refused_before_any_ssh(tools, tmp_path):
    call = ("launch", "ssh", f"--hosts={ODD_HOSTS[0]},b", "--", "train", "--output-dir", tmp_path / "run")
    done = rlcb(*call, cwd=tmp_path, variables={"PATH": tools.path})
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: Host '-oProxyCommand")
    assert not tools.calls("ssh")


def test_hosts_files_as_they_come(tmp_path):
    """From Windows, with a byte order mark, through a pipe, longer than a file name may be; or no file of text."""
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfnode1 workers=2\r\n# a comment\r\nme@node2\r\n")
    assert read_hosts(str(file)) == [Host("node1", "node1", 2), Host("me@node2", "node2")]
    many = [f"node{number:03}" for number in range(100)]
    assert [host.name for host in read_hosts(",".join(many))] == many
    assert read_hosts("[fe80::1%eth0],user@10.0.0.1")[1].address == "10.0.0.1"
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("a\nb\n",))
    writer.start()
    assert [host.name for host in read_hosts(str(tmp_path / "pipe"))] == ["a", "b"]
    writer.join()
    file.write_bytes(b"caf\xe9\n")
    for text, sentence in ((file, "is not text"), (tmp_path, "cannot be read"), ("no/such", "does not exist")):
        with pytest.raises(UserError, match=sentence):
            read_hosts(str(text))
