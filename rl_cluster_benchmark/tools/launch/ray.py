"""`rlcb launch ray`: a node on each machine of a Ray cluster, held by a placement group with that machine's CPUs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import ORDERS, Signals
from rl_cluster_benchmark.tools.launch.command import TrainCommand
from rl_cluster_benchmark.tools.launch.launch_processes import Lines, LocalProcess, NodeProcess, take_lines
from rl_cluster_benchmark.tools.launch.ssh import handed_on
from rl_cluster_benchmark.tools.launch.supervise import NO_OTHER_HEAD, say, supervise

SECONDS_TO_PLACE = 120
SECONDS_TO_ANSWER = 20.0
LOST = 255  # the status of a node whose machine left the cluster, as with ssh


class NodeActor:
    """A Ray actor that holds a node's process and the lines it has printed."""

    def __init__(self) -> None:
        self._lines: Lines = queue.SimpleQueue()
        self._process: LocalProcess | None = None

    def address(self) -> tuple[str, int]:
        """Return this machine's address in the Ray cluster and a free port there."""
        ray = _ray()
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def start(self, call: list[str], environ: dict[str, str], directory: str | None) -> None:
        self._process = LocalProcess(
            "node", [sys.executable, *call], self._lines, os.environ | environ, cwd=directory,
            at_our_end=signal.SIGKILL, told=ORDERS,  # a raylet that ends takes this actor with it
        )  # fmt: skip

    def look(self) -> tuple[int | None, list[str]]:
        """Return the exit status or None, and what was printed since the last look."""
        assert self._process is not None
        status = self._process.poll()
        return status, [line for _, line in take_lines(self._lines)]

    def send(self, number: int) -> None:
        if self._process is not None:
            self._process.send(number)


class RayProcess:
    """A node in the cluster as the launcher sees it."""

    def __init__(self, name: str, actor: Any, lines: Lines) -> None:
        self.name, self._actor, self._lines = name, actor, lines
        self._status: int | None = None

    def poll(self) -> int | None:
        ray = _ray()
        if self._status is None:
            try:
                self._status, lines = ray.get(self._actor.look.remote(), timeout=SECONDS_TO_ANSWER)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                self._status, lines = LOST, ["The machine has left the Ray cluster, or does not answer."]
            for line in lines:
                self._lines.put((self.name, line))
        return self._status

    def send(self, number: int) -> None:
        self._actor.send.remote(number)

    def kill(self) -> None:
        ray = _ray()
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
        self._status = 137 if self._status is None else self._status

    def close(self) -> None:
        ray = _ray()
        with contextlib.suppress(Exception):
            _, lines = ray.get(self._actor.look.remote(), timeout=5)
            for line in lines:
                self._lines.put((self.name, line))
            ray.kill(self._actor)


class RayEngine:
    def __init__(self, command: TrainCommand, directory: str | None, variables: Sequence[str]) -> None:
        self.command, self.directory, self.variables = command, directory, variables
        self._group: Any = None
        self._head: str | None = None  # the machine that every attempt must have as its head

    def available(self, wanted: int) -> int:
        """Ask each machine: Ray lists one as alive for a while after it is gone."""
        known = list(machines())
        with ThreadPoolExecutor(max_workers=32) as pool:
            there = [node_id for node_id, answer in zip(known, pool.map(_answers, known), strict=True) if answer]
        if self._head is not None and self._head not in map(_address, there):
            raise TrainingFailedError(NO_OTHER_HEAD.format(self._head))
        return min(wanted, len(there))

    def start(self, num_nodes: int, attempt: int, lines: Lines) -> Sequence[NodeProcess]:
        ray = _ray()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        cpus = sorted(machines().values(), reverse=True)[:num_nodes]
        bundles = [{"CPU": min(cpus)} for _ in range(num_nodes)]  # any machine takes any bundle
        if self._head is not None:
            bundles[0][f"node:{self._head}"] = 0.001  # but for the head's: each machine has one of a thing of this name
        self._group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(SECONDS_TO_PLACE):
            raise UserError(
                f"Ray has no {num_nodes} machines with {min(cpus):g} free CPUs each (waited {SECONDS_TO_PLACE} s); "
                "is something else running there? See `ray status`."
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor_class = ray.remote(NodeActor)
        actors = [
            actor_class.options(num_cpus=bundles[0]["CPU"], scheduling_strategy=strategy(self._group, rank)).remote()
            for rank in range(num_nodes)
        ]
        addresses = ray.get([actor.address.remote() for actor in actors], timeout=SECONDS_TO_PLACE)
        address, port = addresses[0]
        if not self.command.config.cluster.shared_filesystem:
            self._head = address
        environ = self.command.variables(attempt) | {"RLCB_PROGRESS": "lines", "PYTHONUNBUFFERED": "1"}
        environ |= handed_on(self.variables)
        for rank, actor in enumerate(actors):
            call = self.command.for_node(rank, num_nodes=num_nodes, address=address, port=port)
            if self.command.config.parallel.num_workers is None:
                call += ["--workers-per-node", str(max(1, int(bundles[0]["CPU"])))]
            ray.get(actor.start.remote(call, environ, self.directory), timeout=SECONDS_TO_ANSWER)
        names = [f"node {rank} ({where})" for rank, (where, _) in enumerate(addresses)]
        return [RayProcess(name, actor, lines) for name, actor in zip(names, actors, strict=True)]


def _ray() -> Any:
    """Return the module, which is optional and whose types are not checked; raise a UserError if it is missing."""
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("Ray is not installed: pip install '.[ray]' in a checkout (or pip install ray).") from None


def machines() -> dict[str, float]:
    """Return the CPUs of each machine of the cluster, by its id."""
    nodes = [node for node in _ray().nodes() if node["Alive"] and "CPU" in node["Resources"]]
    return {node["NodeID"]: node["Resources"]["CPU"] for node in nodes}


def _address(node_id: str) -> str:
    return next(node["NodeManagerAddress"] for node in _ray().nodes() if node["NodeID"] == node_id)


def _answers(node_id: str) -> bool:
    ray = _ray()
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    question = ray.remote(_yes).options(num_cpus=0, scheduling_strategy=there)
    try:
        return bool(ray.get(question.remote(), timeout=SECONDS_TO_ANSWER))
    except ray.exceptions.RayError:
        return False


def _yes() -> bool:
    return True


def launch(
    command: TrainCommand, *, address: str | None, num_nodes: int | None, directory: str | None,
    variables: Sequence[str], signals: Signals,
) -> int:  # fmt: skip
    ray = _ray()
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own reports nothing to anybody
    with contextlib.ExitStack() as stack:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"No Ray cluster answers at {address or 'the default address'} ({error}).") from None
        stack.callback(ray.shutdown)
        signals.install()  # Ray has put handlers of its own in their place
        there = len(machines())
        wanted = num_nodes or there
        if wanted > there:
            raise UserError(f"The Ray cluster has {there} machines with CPUs, {wanted} are wanted.")
        say(f"Ray cluster with {there} machines, {wanted} take part.")
        return supervise(RayEngine(command, directory, variables), command.config, wanted, signals)
