"""Ray itself: a cluster of three hosts with a network of their own, one of which is lost in the middle of a run."""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import FOREVER, ROOT, TINY, check_run, updates, wait_until

# Ray reports nothing to its makers, and asks for a token as on a real cluster.
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}


@pytest.fixture
def raylets(hosts, processes, tmp_path):
    """`ray start` on h1 (the head), h2 and h3; ends with their processes."""
    pytest.importorskip("ray", reason="not installed: ray (make test-cluster installs it)")
    home = Path(tempfile.mkdtemp(prefix="rlcbray"))  # short: sockets go below it
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", 1, "--disable-usage-stats"]
    started = []
    for index in (1, 2, 3):
        where = ["--head", "--port", 6379, "--temp-dir", home, "--include-dashboard=false"]
        where = where if index == 1 else ["--address", f"{hosts.address(1)}:6379"]
        log = tmp_path / f"ray{index}.log"
        call = [*ray, *where, "--node-ip-address", hosts.address(index)]
        started.append(processes.start(hosts.call(index, call), log, **RAY))
        wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 60, "ray start", log)
    yield started
    processes.end()
    shutil.rmtree(home, ignore_errors=True)


def launch(hosts, processes, log, output, *args):
    call = [
        *(sys.executable, "-m", "rl_cluster_benchmark", "launch", "ray", "--address", f"{hosts.address(1)}:6379"),
        *("--env", "PYTHONPATH", "--directory", ROOT, "--", "train", *TINY, "--output-dir", output, *args),
    ]
    return processes.start(hosts.call(1, call), log, **RAY)


def test_three_hosts_and_then_two(hosts, raylets, processes, tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    args = ("--total-timesteps", FOREVER, "--set", "cluster.min_nodes=2")
    process = launch(hosts, processes, log, output, *args)
    wait_until(lambda: updates(output) > 6, 120, "training", log)
    assert "Machines: 3: " in log.read_text()
    for member in (*psutil.Process(raylets[2].pid).children(recursive=True), raylets[2]):
        member.kill()
    wait_until(lambda: "with 2 of 3 machines" in log.read_text(), 180, "the restart", log)
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 180, "going on", log)
    os.kill(process.pid, signal.SIGTERM)
    wait_until(lambda: process.poll() is not None, 60, "the end", log)
    assert process.returncode == 128 + signal.SIGTERM, log.read_text()
    check_run(output, nodes=2, state="interrupted")
