"""Runs of several pretended machines: processes of this one, over the loopback interface."""

from __future__ import annotations

import json
import subprocess
import time

import psutil
import torch

from helpers.commands import ROOT, environment
from helpers.forked import Command
from helpers.processes import workers_of
from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.training import training

TINY = (
    "--env", "Catch-v0", "--set", "training.n_steps=32", "--set", "parallel.pin=never", "--num-envs", 16,
    "--batch-size", 128, "--num-threads", 1, "--set", "hardware.precision=float32", "--set", "cluster.timeout=10",
    "--set", "logging.tensorboard=false",
)  # fmt: skip
FOREVER = 100_000_000


class Nodes:
    """The processes of a run, one per pretended machine."""

    def __init__(self) -> None:
        self.processes = []
        self.port = free_port()

    def start(self, output, *args, nodes=2, workers=1, algorithm="ppo", timesteps=2500, each=lambda rank: ()):
        for rank in range(nodes):
            call = ["train", "--algorithm", algorithm, "--mode", "distributed", *TINY, "--num-nodes", nodes]
            call += ["--workers-per-node", workers, "--master-addr", "127.0.0.1", "--master-port", self.port]
            call += ["--node-rank", rank, "--total-timesteps", timesteps, "--output-dir", output, *args, *each(rank)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self.processes.append(Command(call, cwd=ROOT, env=environment(), text=True, **pipes))
        return self.processes

    def ends(self, timeout=200):
        """[(exit status, output)] of all."""
        texts = [process.communicate(timeout=timeout)[0] for process in self.processes]
        return [(process.returncode, text) for process, text in zip(self.processes, texts, strict=True)]

    def workers(self):
        return [worker for process in self.processes for worker in workers_of(process)]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()


def train(output, *args, **kwargs):
    started = Nodes()
    try:
        started.start(output, *args, **kwargs)
        ends = started.ends()
        assert [status for status, _ in ends] == [0] * len(ends), ends
        return ends
    finally:
        started.kill()


def metrics(output, label="PPO_Distributed"):
    return [json.loads(line) for line in (output / "logs" / label / "metrics.jsonl").read_text().splitlines()]


def summary(output):
    return json.loads((output / "training_summary.json").read_text())


def wait_for_updates(output, count, nodes, label="PPO_Distributed"):
    log = output / "logs" / label / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not log.exists() or log.read_text().count("\n") < count:
        assert all(process.poll() is None for process in nodes.processes), nodes.ends()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def sequential_state(output, algorithm, timesteps=2500):
    """The reference, with the preset that distributed mode starts from, trained in this process: it starts no other."""
    torch.set_num_threads(1)
    args = ["train", "--config", f"{algorithm}_cpu_cluster", "--mode", "sequential", *TINY]
    args += ["--total-timesteps", timesteps, "--output-dir", output]
    config = main.config_from(main.build_parser().parse_args(list(map(str, args))))
    assert training.train(config, Signals()) == 0
    return checkpoint.load(output / "checkpoints" / f"{algorithm}_sequential_final.pt")


def nodes_of(process):
    """Its node processes by rank."""
    found = {}
    for child in psutil.Process(process.pid).children():
        words = child.cmdline()
        found[int(words[words.index("--node-rank") + 1])] = child
    return found
