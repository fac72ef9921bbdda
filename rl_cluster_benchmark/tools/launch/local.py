"""`rlcb launch local`: several nodes on this machine, to try a distributed run without a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine import detection, planning
from rl_cluster_benchmark.tools.launch.command import TrainCommand, interpreter
from rl_cluster_benchmark.tools.launch.launch_processes import Lines, LocalProcess, NodeProcess
from rl_cluster_benchmark.tools.launch.supervise import supervise

LOOPBACK = "127.0.0.1"


class LocalEngine:
    def __init__(self, command: TrainCommand, num_nodes: int) -> None:
        self.command = command
        self._workers = shared_cores(command.config, num_nodes)

    def available(self, wanted: int) -> int:
        return wanted

    def start(self, num_nodes: int, attempt: int, lines: Lines) -> Sequence[NodeProcess]:
        port = free_port()
        environ = os.environ | self.command.variables(attempt) | {"PYTHONUNBUFFERED": "1"}
        calls = [
            self.command.for_node(rank, num_nodes=num_nodes, address=LOOPBACK, port=port) for rank in range(num_nodes)
        ]
        return [
            LocalProcess(f"node {rank}", [interpreter(None), *call, *self._workers], lines, environ)
            for rank, call in enumerate(calls)
        ]


def shared_cores(config: Config, num_nodes: int) -> list[str]:
    """Return the arguments of a node that shares this machine's cores: by itself it would take all of them."""
    share, workers = max(1, detection.detect().usable_cores // num_nodes), config.parallel.num_workers
    if not config.traits.has_actors:
        return [] if workers else ["--workers-per-node", str(share)]
    actors, learners = config.impala.num_actors, config.impala.num_learners
    if not isinstance(actors, int):
        actors = workers or max(1, share - learners if isinstance(learners, int) else share // 2)
    if not isinstance(learners, int):
        learners = planning.learners_beside(actors, share, config)
    settings = {"impala.num_actors": actors, "impala.num_learners": learners, "parallel.pin": "never"}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def launch(command: TrainCommand, num_nodes: int, signals: Signals) -> int:
    return supervise(LocalEngine(command, num_nodes), command.config, num_nodes, signals)
