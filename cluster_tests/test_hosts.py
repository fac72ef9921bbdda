"""torchrun, plain flags and SSH over three hosts with a network; what happens when a host or a link is lost."""

import json
import os
import signal
import sys
import time

import psutil
import pytest
from conftest import FOREVER, RLCB, ROOT, TINY, check_run, finished, updates, wait_until


def launch_ssh(hosts, sshd, tmp_path, output, *args):
    file = tmp_path / "hosts.txt"
    file.write_text("h1\nh2\nh3\n")
    options = [word for option in sshd for word in ("--ssh-option", option)]
    return hosts.call(0, [*RLCB, "launch", "ssh", "--hosts", file, *options, "--env", "PYTHONPATH", "--directory", ROOT,
                          "--", "train", *TINY, "--output-dir", output, *args])  # fmt: skip


def node_process(name, rank):
    """The process of a node among all of this machine's, by its arguments."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_node = words[:1] == [sys.executable] and name in words and "--node-rank" in words
        if is_node and words[words.index("--node-rank") + 1] == str(rank):
            return process
    raise AssertionError(f"node {rank} is not running")


def workers_of(node):
    """In the order of their ranks: the first is the leader. They are children of the server that forks them."""
    found = [worker for child in node.children() for worker in child.children()]
    return sorted(found, key=lambda worker: (worker.create_time(), worker.pid))


def test_torchrun_on_three_hosts(hosts, processes, tmp_path):
    output = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 3, "--nproc-per-node", 1, "--rdzv-backend",
                "c10d", "--rdzv-endpoint", "h1:29400", "--rdzv-id", "test"]  # fmt: skip
    script = [ROOT / "train_ppo_distributed.py", *TINY, "--total-timesteps", 4000, "--output-dir", output]
    logs = [tmp_path / f"h{index}.log" for index in (1, 2, 3)]
    nodes = [processes.start(hosts.call(i, [*torchrun, *script]), log) for i, log in zip((1, 2, 3), logs, strict=True)]
    for process, log in zip(nodes, logs, strict=True):
        assert finished(process, 120, log) == 0, log.read_text()
    assert sorted(check_run(output, nodes=3)["nodes"]) == ["h1", "h2", "h3"]


def test_the_same_command_on_every_host(hosts, processes, tmp_path):
    """No rank is given: who has the head's address is the head."""
    output = tmp_path / "run"
    call = [sys.executable, ROOT / "train_ppo_distributed.py", *TINY, "--config", "config/ppo_cpu_cluster.yaml",
            "--num-workers", 2, "--master-addr", hosts.address(2), "--total-timesteps", 2000,
            "--output-dir", output]  # fmt: skip
    logs = [tmp_path / f"h{index}.log" for index in (1, 2)]
    nodes = [processes.start(hosts.call(i, call), log) for i, log in zip((1, 2), logs, strict=True)]
    for process, log in zip(nodes, logs, strict=True):
        assert finished(process, 90, log) == 0, log.read_text()
    assert check_run(output, nodes=2)["nodes"] == ["h2", "h1"]


ASYNCHRONOUS = {
    "a3c": ("A3C_Distributed", ()),
    "impala": ("IMPALA_Distributed", ("--set", "impala.num_actors=1", "--set", "impala.num_learners=1")),
}


def start_asynchronous(hosts, processes, tmp_path, output, algorithm, *args):
    """[(process, its log)] on two hosts, h2 the head."""
    call = [*RLCB, "train", "--algorithm", algorithm, "--mode", "distributed", *TINY, *ASYNCHRONOUS[algorithm][1],
            "--set", "cluster.sync=async", "--set", "training.log_interval=1", "--num-nodes", 2, "--master-addr",
            hosts.address(2), "--output-dir", output, *args]  # fmt: skip
    logs = [tmp_path / f"h{index}.log" for index in (2, 1)]
    return [(processes.start(hosts.call(i, call), log), log) for i, log in zip((2, 1), logs, strict=True)]


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_machines_that_do_not_wait_for_each_other_learn(algorithm, hosts, processes, tmp_path):
    output = tmp_path / "run"
    args = ("--total-timesteps", 80_000, "--learning-rate", "0.003", "--set", "training.gamma=0.99")
    for process, log in start_asynchronous(hosts, processes, tmp_path, output, algorithm, *args):
        assert finished(process, 120, log) == 0, log.read_text()
    summary = check_run(output, nodes=2, label=ASYNCHRONOUS[algorithm][0])
    assert summary["nodes"] == ["h2", "h1"]
    assert summary["final_reward"] > 0.7, "Catch is learned"
    assert summary["asynchrony"]["parameter_exchanges"] > 3


@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_a_cut_link_ends_machines_that_do_not_wait_for_each_other(algorithm, hosts, processes, tmp_path):
    output, label = tmp_path / "run", ASYNCHRONOUS[algorithm][0]
    args = ("--total-timesteps", FOREVER)
    (head, log), (other, other_log) = start_asynchronous(hosts, processes, tmp_path, output, algorithm, *args)
    wait_until(lambda: updates(output, label) > 6, 90, "training", log)
    hosts.cut(1)
    cut_at = time.monotonic()
    assert finished(head, 30, log) == 1, log.read_text()
    assert time.monotonic() - cut_at < 20, "cluster.timeout is 6 s"
    assert finished(other, 30, other_log) == 1, other_log.read_text()  # it waits longer for the reason, in vain
    assert "Node 1 (h1)" in log.read_text()
    assert "Traceback" not in log.read_text() + other_log.read_text()
    check_run(output, nodes=2, state="failed", label=label)


def test_ssh_reaches_the_threshold(hosts, processes, sshd, tmp_path):
    output, log = tmp_path / "run", tmp_path / "launch.log"
    args = ("--total-timesteps", 60_000, "--learning-rate", "0.003", "--set", "training.gamma=0.99")
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, *args), log)
    assert finished(process, 180, log) == 0, log.read_text()
    summary = check_run(output, nodes=3)
    assert summary["final_reward"] > 0.8, "Catch is learned"
    assert "[h1] " in log.read_text()
    assert "[h3] Node 2 (h3): finished" in log.read_text()


def test_ssh_killed_node_is_started_again(hosts, processes, sshd, tmp_path):
    output, log = tmp_path / "run", tmp_path / "launch.log"
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", 30_000), log)
    wait_until(lambda: updates(output) > 6, 90, "training", log)
    node_process(str(output), 2).kill()
    assert finished(process, 150, log) == 0, log.read_text()
    assert "Restart 1 of 3, from the last checkpoint." in log.read_text()
    check_run(output, nodes=3)


def test_ssh_a_worker_a_leader_and_the_head_are_killed_in_turn(hosts, processes, sshd, tmp_path):
    """Each end is told with its reason, and the run goes on from its last checkpoint."""
    output, log = tmp_path / "run", tmp_path / "launch.log"
    args = ("--total-timesteps", FOREVER, "--workers-per-node", 2)
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, *args), log)
    victims = (
        (lambda: workers_of(node_process(str(output), 1))[1], "Worker 1 was killed by SIGKILL"),
        (lambda: workers_of(node_process(str(output), 2))[0], "Worker 0 was killed by SIGKILL"),
        (lambda: node_process(str(output), 0), "Node 0 (h1)"),
    )
    for restart, (victim, reason) in enumerate(victims, start=1):
        before = updates(output)
        wait_until(lambda before=before: updates(output) > before + 6, 90, "training", log)
        read = len(log.read_text())
        killed_at = time.monotonic()
        victim().kill()
        ended = f"Restart {restart} of 3, from the last checkpoint."
        wait_until(lambda ended=ended: ended in log.read_text(), 60, ended, log)
        assert time.monotonic() - killed_at < 45, "the others are told, or fall silent for cluster.timeout = 6 s"
        assert reason in log.read_text()[read:], log.read_text()[read:]
    before = updates(output)
    wait_until(lambda: updates(output) > before + 6, 90, "going on", log)
    os.kill(process.pid, signal.SIGTERM)
    assert finished(process, 60, log) == 128 + signal.SIGTERM, log.read_text()
    check_run(output, nodes=3, state="interrupted")


def test_a_link_cut_in_the_middle_of_a_reduction(hosts, processes, tmp_path):
    """At 1 Mbit/s a gradient is under way most of the time; both ends stop with the reason, and none hangs."""
    hosts.slow_down(round_trip_ms=0, rate="1mbit")
    output = tmp_path / "run"
    call = [*RLCB, "train", "--mode", "distributed", *TINY, "--set", "model.hidden_size=256", "--num-nodes", 2,
            "--master-addr", "h1", "--total-timesteps", FOREVER, "--output-dir", output]  # fmt: skip
    logs = [tmp_path / f"h{index}.log" for index in (1, 2)]
    nodes = [processes.start(hosts.call(rank + 1, [*call, "--node-rank", rank]), log) for rank, log in enumerate(logs)]
    wait_until(lambda: updates(output) > 1, 90, "training", logs[0])
    lines = (output / "logs/PPO_Distributed/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["time/communication"] > 0.8, "a cut now most likely falls into a reduction"
    hosts.cut(2)
    cut_at = time.monotonic()
    for process, log in zip(nodes, logs, strict=True):
        assert finished(process, 30, log) == 1, log.read_text()
        assert "Node" in log.read_text().rpartition("error: ")[2]
        assert "Traceback" not in log.read_text()
    assert time.monotonic() - cut_at < 20, "cluster.timeout is 6 s"
    check_run(output, nodes=2, state="failed")


def test_ssh_a_cut_host_is_left_out(hosts, processes, sshd, tmp_path):
    """The link of a host goes down in the middle of training and stays down: the run goes on with two."""
    output, log = tmp_path / "run", tmp_path / "launch.log"
    args = ("--total-timesteps", FOREVER, "--set", "cluster.min_nodes=2")
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, *args), log)
    wait_until(lambda: updates(output) > 6, 90, "training", log)
    lonely = node_process(str(output), 2)
    hosts.cut(3)
    cut_at = time.monotonic()
    wait_until(lambda: "error: " in log.read_text(), 30, "the end of the others", log)
    assert time.monotonic() - cut_at < 20, "cluster.timeout is 6 s"
    assert "Node 2 (h3)" in log.read_text()
    assert not psutil.wait_procs([lonely], timeout=20)[1], "the machine that is cut off ends by itself"
    before = updates(output)
    wait_until(lambda: "with 2 of 3 machines" in log.read_text(), 90, "the restart", log)
    wait_until(lambda: updates(output) > before + 5, 90, "going on", log)
    os.kill(process.pid, signal.SIGTERM)
    finished(process, 60, log)
    check_run(output, nodes=2, state="interrupted")


def test_ssh_sigterm_ends_all(hosts, processes, sshd, tmp_path):
    output, log = tmp_path / "run", tmp_path / "launch.log"
    process = processes.start(launch_ssh(hosts, sshd, tmp_path, output, "--total-timesteps", FOREVER), log)
    wait_until(lambda: updates(output) > 3, 90, "training", log)
    os.kill(process.pid, signal.SIGTERM)
    assert finished(process, 60, log) == 128 + signal.SIGTERM, log.read_text()
    check_run(output, nodes=3, state="interrupted")
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(output) in (p.info["cmdline"] or [])]


def test_a_directory_that_is_not_shared_is_refused(hosts, processes, tmp_path):
    """Each host has a /tmp of its own."""
    output = "/mnt/rlcb-not-shared/run"
    os.makedirs("/mnt", exist_ok=True)
    private = ["bash", "-c", 'mount -t tmpfs none /mnt && exec "$@"', "x"]
    call = [*RLCB, "train", "--mode", "distributed", *TINY, "--num-nodes", 2, "--master-addr", "h1"]
    logs = [tmp_path / f"h{index}.log" for index in (1, 2)]
    nodes = []
    for rank, log in enumerate(logs):
        node = [*private, *call, "--node-rank", rank, "--output-dir", output]
        nodes.append(processes.start(hosts.call(rank + 1, node), log))
    for process, log, status in zip(nodes, logs, (1, 2), strict=True):
        assert finished(process, 60, log) == status, log.read_text()
        assert "does not see the run directory /mnt/rlcb-not-shared/run" in log.read_text()
        assert "Traceback" not in log.read_text()


def test_a_name_that_means_the_host_itself_is_told(hosts, processes, tmp_path):
    log = tmp_path / "log"
    call = [*RLCB, "train", "--mode", "distributed", *TINY, "--num-nodes", 2, "--master-addr", "localhost",
            "--node-rank", 1, "--set", "cluster.join_timeout=3", "--output-dir", tmp_path / "run"]  # fmt: skip
    assert finished(processes.start(hosts.call(2, call), log), 30, log) == 1
    assert "The head at localhost:29500 (an address of this machine itself) did not answer" in log.read_text()


def test_torchrun_starts_a_killed_worker_again(hosts, processes, tmp_path):
    """Its restarts run the same command again: the run goes on by itself."""
    output = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1,
                "--max-restarts", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "h1:29400",
                "--rdzv-id", "again"]  # fmt: skip
    script = [ROOT / "train_ppo_distributed.py", *TINY, "--total-timesteps", 40_000, "--output-dir", output]
    logs = [tmp_path / f"h{index}.log" for index in (1, 2)]
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # with the shared one, restarts sometimes fail to connect
    nodes = [
        processes.start(hosts.call(i, [*torchrun, *script]), log, **environ)
        for i, log in zip((1, 2), logs, strict=True)
    ]
    wait_until(lambda: updates(output) > 6, 120, "training", logs[0])
    for agent in nodes:
        (node,) = psutil.Process(agent.pid).children()
        workers = [worker for child in node.children() for worker in child.children()]
        if workers:
            workers[0].kill()
            break
    for process, log in zip(nodes, logs, strict=True):
        assert finished(process, 150, log) == 0, log.read_text()
    assert any("Resumed from" in log.read_text() for log in logs)
    check_run(output, nodes=2)
