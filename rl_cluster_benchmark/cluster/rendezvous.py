"""The rendezvous of a run's nodes: all register at a store on the head and check that they agree, before training."""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.cluster import network
from rl_cluster_benchmark.cluster.membership import Membership
from rl_cluster_benchmark.cluster.placement import Placement
from rl_cluster_benchmark.cluster.store import (
    SECONDS_BETWEEN_TRIES,
    STORE_TIMEOUT,
    client,
    connect,
    prefixed,
    told_if_silent,
    wait_a_moment,
)
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine import detection, planning
from rl_cluster_benchmark.run.provenance import git_commit, package_versions

SECONDS_FOR_ALL_TO_READ = 5.0
# The config keys that may differ between machines: about the network, and how many workers each has.
NODE_KEYS = (
    "parallel.num_workers", "impala.num_learners", "impala.split", "hardware.num_threads", "cluster.num_workers",
    "cluster.master_addr", "cluster.master_port", "cluster.interface", "cluster.min_nodes", "cluster.max_restarts",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """What a node tells the others about itself."""

    name: str
    address: str
    interface: str
    id: str  # unique to this process
    job: str  # name of the launch or scheduler job that started it
    boot: str  # id of the machine's boot: the same for nodes on one machine
    num_workers: int
    num_learners: int  # IMPALA's; its workers are actors
    usable_cores: int
    cpu_model: str
    versions: dict[str, str | None]
    config: dict[str, Any]

    @property
    def processes(self) -> str:
        """Return the node's numbers of actors and learners, or of workers, in words."""
        if self.num_learners:
            return f"{self.num_workers} actors, {self.num_learners} learners"
        return f"{self.num_workers} workers"


@dataclass
class Cluster:
    """The nodes of a run and the store that they share, as one of them sees them."""

    rank: int
    nodes: list[Node]
    store: Any
    address: tuple[str, int]  # of the store
    prefix: str
    membership: Membership
    place: Placement
    join_timeout: float
    signals: Signals

    @property
    def is_head(self) -> bool:
        return self.rank == 0

    @property
    def num_workers(self) -> int:
        return sum(node.num_workers for node in self.nodes)

    @property
    def num_learners(self) -> int:
        return sum(node.num_learners for node in self.nodes)

    def shares(self) -> list[tuple[str, int, int]]:
        """Return (name, workers, usable cores) of each node; cores of a machine with several nodes count once."""
        seen: set[str] = set()
        shares = []
        for node in self.nodes:
            shares.append((node.name, node.num_workers, 0 if node.boot in seen else node.usable_cores))
            seen.add(node.boot)
        return shares

    def label(self, rank: int) -> str:
        return _label(rank, self.nodes[rank].name)

    def take_signal(self, rank: int, number: int) -> None:
        """Let this node stop as if it had received the signal that another node has received."""
        if self.signals.received is None:
            self.signals.receive(number)
            print(f"{self.label(rank)} received {signal.Signals(number).name}: all machines stop.", flush=True)

    @told_if_silent()
    def publish(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    @told_if_silent()
    def read(self, key: str) -> Any:
        """Wait until some node has published the key, and return its value."""
        deadline = time.monotonic() + self.join_timeout
        while not self.store.check([key]):
            self.membership.check()
            wait_a_moment(deadline, self.signals, f"The head did not publish its {key} in time.")
        return json.loads(self.store.get(key))


@told_if_silent()
def meet(config: Config, placement: Placement, signals: Signals) -> Cluster:
    """Wait until all nodes are there, check that they agree, and return the cluster."""
    store, prefix, rank, nodes = gather(config, placement, signals)
    _agree(store, rank, nodes)
    labels = [_label(rank, node.name) for rank, node in enumerate(nodes)]
    address = (placement.master_addr, placement.master_port)

    def another(timeout: timedelta) -> Any:
        return prefixed(prefix, client(*address, timeout))

    membership = Membership(another, rank, labels, config.cluster.timeout)
    return Cluster(rank, nodes, store, address, prefix, membership, placement, config.cluster.join_timeout, signals)


@told_if_silent()
def gather(config: Config, placement: Placement, signals: Signals) -> tuple[Any, str, int, list[Node]]:
    """Wait until all nodes are there; return the store, its prefix, this node's rank and all nodes, unchecked."""
    here = network.endpoint(placement.master_addr, placement.master_port, config.cluster.interface)
    deadline = time.monotonic() + config.cluster.join_timeout
    store, rank = connect(placement, deadline, signals)
    prefix = f"rlcb/{placement.attempt}"
    store = prefixed(prefix, store)
    store.set_timeout(STORE_TIMEOUT)
    if rank is None:
        rank = store.add("joined", 1)
    if rank >= placement.num_nodes:
        raise UserError(
            f"More than {placement.num_nodes} machines came to {placement.master_addr}:{placement.master_port}; "
            "--num-nodes says how many take part, and each run needs a --master-port of its own."
        )
    this = _this_node(config, placement, here)
    nodes = _roll_call(store, rank, this, placement, deadline, signals)
    # From here on, keys begin with the head's id, which is new in every attempt: no key of an earlier one is read.
    return prefixed(nodes[0].id, store), f"{prefix}/{nodes[0].id}", rank, nodes


def _agree(store: Any, rank: int, nodes: list[Node]) -> None:
    """Check that the nodes agree, as all of them do; if not, the head waits until all have read the list, then raises.

    The store ends with the head's process.
    """
    store.add("read", 1)
    try:
        check_agreement(nodes)
    except UserError:
        deadline = time.monotonic() + SECONDS_FOR_ALL_TO_READ
        while rank == 0 and store.add("read", 0) < len(nodes) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_TRIES)
        raise


def check_agreement(nodes: list[Node]) -> None:
    """Raise a UserError unless all nodes have the head's versions and config, and addresses that others can reach."""
    head = nodes[0]
    for rank, node in enumerate(nodes):
        label = _label(rank, node.name)
        if network.Endpoint(node.address, node.interface).is_loopback and len({n.boot for n in nodes}) > 1:
            raise UserError(
                f"{label} would talk to the other machines over the loopback interface ({node.address}), which they "
                "cannot reach: its name for the head means itself. Give the head's address in the network with "
                "--master-addr, or set cluster.interface."
            )
        for what, version in node.versions.items():
            expected = head.versions.get(what)
            if version != expected and None not in (version, expected):
                raise UserError(
                    f"{label} has {what} {version}, the head ({head.name}) has {expected}; install the same version on "
                    "all machines."
                )
        differing = [key for key, value in node.config.items() if head.config.get(key) != value]
        if differing:
            key = differing[0]
            raise UserError(
                f"{label} was started with {key} = {node.config[key]}, the head ({head.name}) with "
                f"{head.config.get(key)}; start all machines with the same command."
            )


def _roll_call(
    store: Any, rank: int, this: Node, placement: Placement, deadline: float, signals: Signals
) -> list[Node]:
    """Register this node and return the list of all nodes, once all agree on it.

    The store may be older than this attempt (torchrun's is) and still hold registrations of the last one. So the head
    publishes a list of the registrations it finds, each node confirms a list that contains its own, and the list is
    valid once all have confirmed it. Until then, a registration that comes late makes a new list.
    """
    everybody = range(placement.num_nodes)
    store.set(f"node/{rank}", json.dumps(asdict(this)))
    heard: set[int] = set()
    while True:
        if rank == 0:
            heard = {other for other in everybody if store.check([f"node/{other}"])}
            if len(heard) == placement.num_nodes:
                words = store.multi_get([f"node/{other}" for other in everybody])
                store.set("list", json.dumps([json.loads(word) for word in words]))
        if store.check(["list"]):
            nodes = [Node(**word) for word in json.loads(store.get("list"))]
            if rank < len(nodes) and nodes[rank].id == this.id:
                name = hashlib.sha256("".join(node.id for node in nodes).encode()).hexdigest()
                store.set(f"answer/{name}/{rank}", "")
                if rank == 0 and store.check([f"answer/{name}/{other}" for other in everybody]):
                    store.set(f"holds/{name}", "")
                if store.check([f"holds/{name}"]):
                    return nodes
        missing = f"; missing: node {', '.join(str(other) for other in everybody if other not in heard)}"
        wait_a_moment(
            deadline,
            signals,
            f"Not all of {placement.num_nodes} machines came to {placement.master_addr}:{placement.master_port} in "
            f"time (cluster.join_timeout){missing if rank == 0 else ''}. Are they started with the same --master-addr, "
            "--master-port and --num-nodes?",
        )


def _this_node(config: Config, placement: Placement, here: network.Endpoint) -> Node:
    machine, plan = detection.detect(), planning.plan(config)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return Node(
        name=socket.gethostname(),
        address=here.address,
        interface=here.interface,
        id=uuid.uuid4().hex,
        job=placement.job,
        boot=boot.read_text().strip() if boot.exists() else platform.node(),
        num_workers=plan.num_workers,
        num_learners=plan.num_learners,
        usable_cores=machine.usable_cores,
        cpu_model=machine.cpu_model,
        versions={"rl_cluster_benchmark": __version__, "source": git_commit(), **package_versions()},
        config=_flat(config_files.to_dict(config)),
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return {key: value for key, value in flat.items() if key not in NODE_KEYS}


def _label(rank: int, name: str) -> str:
    return f"Node {rank} ({name})"
