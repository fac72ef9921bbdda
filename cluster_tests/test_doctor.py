"""`rlcb doctor --cluster` on three hosts with a network: what is well, what is not, and how fast the links are."""

import json
import sys

import pytest
from conftest import RLCB, ROOT, finished, ssh_settings


@pytest.fixture
def ask(hosts, sshd, processes, tmp_path):
    """(exit status, output) of the doctor on h0, for some lines of a hosts file."""

    def doctor(lines, *args, options=sshd, in_pbs=False):
        file, log = tmp_path / "hosts.txt", tmp_path / "doctor.log"
        file.write_text(lines)
        words = [word for option in options for word in ("--ssh-option", option)]
        words += ["--env", "PYTHONPATH", "--directory", ROOT, *([] if in_pbs else ["--hosts", file]), *args]
        environ = {"PBS_NODEFILE": str(file)} if in_pbs else {}
        call = hosts.call(0, [*RLCB, "doctor", "--cluster", *words])
        status = finished(processes.start(call, log, **environ), 150, log)
        assert "Traceback" not in log.read_text()
        return status, log.read_text()

    return doctor


def test_three_hosts_that_are_well(hosts, ask, tmp_path):
    status, fast = ask("h1\nh2 workers=2\nh3 addr=10.77.0.4\n", "--json", tmp_path / "fast.json")
    assert status == 0, fast
    assert "Ready to train." in fast
    assert "All-reduce of 2.5 MB over 3 machines" in fast
    assert "of 3 times one machine, allreduce" in fast
    hosts.slow_down(round_trip_ms=0, rate="100mbit")
    status, slow = ask("h1\nh2\nh3\n", "--json", tmp_path / "slow.json")
    assert status == 0, slow
    seconds = {}
    for name in ("fast", "slow"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert [member["name"] for member in found["members"]] == ["h1", "h2", "h3"]
        assert [member["address"] for member in found["members"]] == ["10.77.0.2", "10.77.0.3", "10.77.0.4"]
        links = [member["link"] for member in found["members"][1:]]
        assert all(abs(link["skew"]) < 0.1 and 0 < link["round_trip"] < 0.1 for link in links)
        seconds[name] = found["sums"]["gradient"]
    # Each of three hosts sends 2 x 2/3 of 2.5 MB at 12.5 MB/s: 267 ms, and a bucket of 256 kB for nothing.
    assert 0.2 < seconds["slow"] < 0.5
    assert seconds["fast"] < 0.1
    for link in links:
        assert 50 < link["bandwidth"] * 8 / 1e6 < 130


def test_what_would_stop_a_run_is_named(hosts, processes, ask, tmp_path):
    """h2 has a clock that is ahead, h3 another version; nobody answers at h4."""
    package = ROOT / "rl_cluster_benchmark" / "__init__.py"
    ahead = tmp_path / "ahead.py"
    ahead.write_text(package.read_text() + "import time\n_time = time.time\ntime.time = lambda: _time() + 5\n")
    old = tmp_path / "old.py"
    old.write_text('"""Another version."""\n\n__version__ = "0.0.9"\n')
    (tmp_path / "ssh").mkdir()
    config, options = ssh_settings(tmp_path / "ssh", Port=2222)
    for index, file in ((1, package), (2, ahead), (3, old)):
        there = ["bash", "-c", f"mount --bind {file} {package} && exec /usr/sbin/sshd -D -f {config}"]
        processes.start(hosts.call(index, there), tmp_path / f"sshd-{index}.log")
    status, text = ask("h1\nh2\nh3\nh4\n", options=[*options, "Port=2222"])
    assert status == 1, text
    assert "h4 cannot be reached: ssh: Could not resolve hostname h4" in text
    assert "make `ssh h4` work without a question" in text
    assert "h3 has rl_cluster_benchmark 0.0.9, the head (h1) has " in text
    assert "h2's clock is 5.0 s ahead of the head's." in text
    assert "All-reduce of 2.5 MB over 2 machines" in text, "those that can meet are measured"


def test_an_interpreter_or_a_program_that_is_missing(hosts, ask):
    status, text = ask("h1\nh1\nh2\nh2\n", "--python", "/no/such/python", in_pbs=True)
    assert status == 1, text
    assert "Asking 2 machines" in text, "a node file names each as often as it has cores"
    assert "h1 has no /no/such/python" in text
    status, text = ask("h1\nh2\n", "--python", "/usr/bin/python3", "--directory", "/", "--env", "PYTHONPATH=/nowhere")
    assert status == 1, text
    assert "h2 cannot load the program: ModuleNotFoundError" in text


def test_machines_that_cannot_talk_to_each_other(hosts, ask):
    """ssh gets in by name, but the address that the others are given is nobody's."""
    status, text = ask("h1 addr=10.77.0.99\nh2\n", "--timeout", 4)
    assert status == 1, text
    assert "h1: The head cannot listen at 10.77.0.99:29500" in text
    assert "h2: The head at 10.77.0.99:29500 did not answer in time" in text
    assert "open the ports between the machines" in text


def test_under_torchrun(hosts, processes, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend",
                "c10d", "--rdzv-endpoint", "h1:29400", "--rdzv-id", "doctor", *RLCB[1:], "doctor",
                "--cluster"]  # fmt: skip
    logs = [tmp_path / f"h{index}.log" for index in (1, 2)]
    nodes = [processes.start(hosts.call(i, torchrun), log) for i, log in zip((1, 2), logs, strict=True)]
    for process, log in zip(nodes, logs, strict=True):
        assert finished(process, 90, log) == 0, log.read_text()
    assert sum("All-reduce of 2.5 MB over 2 machines" in log.read_text() for log in logs) == 1


def test_a_link_that_is_too_slow_ends_the_measurement(hosts, ask):
    """Nothing hangs: every word between the machines has a time limit."""
    hosts.slow_down(round_trip_ms=0, rate="2mbit")  # a gradient takes ten seconds
    status, text = ask("h1\nh2\n", "--timeout", 4)
    assert status == 1, text
    assert "The machines lost each other while they were measured" in text
