"""What the processes of a run listen at: nothing that another machine could reach, unless it takes part."""

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers.commands import ROOT, TINY, environment
from helpers.forked import Command
from helpers.processes import WORKERS, num_updates

from rl_cluster_benchmark.cluster.network import PORTS, free_port
from rl_cluster_benchmark.tools.launch import ray

LOCAL = ("launch", "local", "--nodes", 2, "--", "train", "--workers-per-node", 1)
RUNS = {
    "one machine": ("train", *WORKERS, "--set", "parallel.reduce=gloo"),  # which changes nothing
    "launch local": LOCAL,
    "launch local, a3c": (*LOCAL, "--algorithm", "a3c"),
}
LABELS = {"one machine": "PPO_Parallel", "launch local": "PPO_Distributed", "launch local, a3c": "A3C_Distributed"}


def listening(process):
    """{(the process, its address)} of a process and all its children."""
    found = set()
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            sockets = each.net_connections(kind="inet")
            found |= {(each.pid, s.laddr.ip) for s in sockets if s.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)}
    return found


@pytest.mark.parametrize("how", ["one machine", *(pytest.param(how, marks=pytest.mark.long) for how in list(RUNS)[1:])])
def test_only_the_loopback_interface(how, tmp_path):
    """Bug 13: and on one machine, without launching, nothing at all."""
    output = tmp_path / "run"
    args = (*RUNS[how], *TINY, "--set", "parallel.pin=never", "--total-timesteps", 10**8, "--output-dir", output)
    with open(tmp_path / "text", "wb") as text:
        process = Command(args, cwd=ROOT, env=environment(), stdout=text, stderr=subprocess.STDOUT)
    parent, seen = psutil.Process(process.pid), set()
    deadline = time.monotonic() + 120
    try:
        while num_updates(output, LABELS[how]) < 3:  # from the start on: some listen for a moment only
            seen |= listening(parent)
            assert process.poll() is None, (tmp_path / "text").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        seen |= listening(parent)
    finally:
        with contextlib.suppress(psutil.Error):
            for child in parent.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        process.kill()
        process.wait()
    assert {address for _, address in seen} == (set() if how == "one machine" else {"127.0.0.1"})


def test_a_free_port_is_none_that_connections_get():
    """Of those the kernel may give the head's port to a machine that tries to reach the head."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert 1024 < port < first
    with socket.create_server(("127.0.0.1", port)):
        assert free_port() != port


def test_nor_is_the_port_of_a_head_in_a_ray_cluster(monkeypatch):
    """What cannot listen at a port that a connection has ends with status 2, which a launch does not try again."""
    here = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "_ray", lambda: SimpleNamespace(util=here))
    address, port = ray.NodeActor().address()
    assert address == "127.0.0.1"
    assert port in PORTS
