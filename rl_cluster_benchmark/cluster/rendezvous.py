"""How the nodes of a run meet: one store on the head, a word from everybody, and checks before anything is trained."""

from __future__ import annotations

import contextlib
import errno
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

from rl_cluster_benchmark import __version__, config_files, hardware
from rl_cluster_benchmark.cluster import network
from rl_cluster_benchmark.cluster.membership import Membership
from rl_cluster_benchmark.cluster.placement import Placement
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.run.stop import Signals
from rl_cluster_benchmark.run.summary import git_commit, package_versions

SECONDS_BETWEEN_TRIES = 0.1
SECONDS_FOR_ALL_TO_READ = 5.0
STORE_TIMEOUT = timedelta(seconds=30)  # of one question to the store
# What may differ between machines: where they are and how many workers each has.
NODE_KEYS = (
    "parallel.num_workers", "hardware.num_threads", "cluster.num_workers", "cluster.master_addr",
    "cluster.master_port", "cluster.interface", "cluster.min_nodes", "cluster.max_restarts",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """What a node tells the others of itself."""

    name: str
    address: str
    interface: str
    id: str  # of this process
    job: str  # who started it
    boot: str  # the same for processes on one machine
    num_workers: int
    usable_cores: int
    cpu_model: str
    versions: dict[str, str | None]
    config: dict[str, Any]


@dataclass
class Cluster:
    """All nodes of the run, as one of them sees it."""

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

    def shares(self) -> list[tuple[str, int, int]]:
        """(name, workers, usable cores) of each node; nodes that are on one machine (for a try) share its cores."""
        seen: set[str] = set()
        shares = []
        for node in self.nodes:
            shares.append((node.name, node.num_workers, 0 if node.boot in seen else node.usable_cores))
            seen.add(node.boot)
        return shares

    def label(self, rank: int) -> str:
        return _label(rank, self.nodes[rank].name)

    def take_signal(self, rank: int, number: int) -> None:
        """Another node was told to stop, and so all stop: this one ends as if it had been told itself."""
        if self.signals.received is None:
            self.signals.received = number
            print(f"{self.label(rank)} received {signal.Signals(number).name}: all machines stop.", flush=True)

    def publish(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Wait until some node has published it."""
        deadline = time.monotonic() + self.join_timeout
        while not self.store.check([key]):
            self.membership.check()
            _wait_a_moment(deadline, self.signals, f"The head did not publish its {key} in time.")
        return json.loads(self.store.get(key))


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked to stop
    """A signal came before training began."""


def meet(config: Config, placement: Placement, signals: Signals) -> Cluster:
    """Wait until all nodes are there and agree; returns the cluster they make."""
    here = network.endpoint(placement.master_addr, placement.master_port, config.cluster.interface)
    deadline = time.monotonic() + config.cluster.join_timeout
    store, rank = _connect(placement, deadline, signals)
    prefix = f"rlcb/{placement.attempt}"
    store = _prefixed(prefix, store)
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
    prefix = f"{prefix}/{nodes[0].id}"  # whatever an earlier attempt left in the store is behind us
    store = _prefixed(nodes[0].id, store)
    _agree(store, rank, nodes)
    labels = [_label(rank, node.name) for rank, node in enumerate(nodes)]
    address = (placement.master_addr, placement.master_port)

    def connect(timeout: timedelta) -> Any:
        return _prefixed(prefix, _client(*address, timeout))

    membership = Membership(connect, rank, labels, config.cluster.timeout)
    return Cluster(rank, nodes, store, address, prefix, membership, placement, config.cluster.join_timeout, signals)


def _agree(store: Any, rank: int, nodes: list[Node]) -> None:
    """All check the same; the head, whose process holds the store, does not leave before all have read it."""
    store.add("read", 1)
    try:
        check_agreement(nodes)
    except UserError:
        deadline = time.monotonic() + SECONDS_FOR_ALL_TO_READ
        while rank == 0 and store.add("read", 0) < len(nodes) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_TRIES)
        raise


def check_agreement(nodes: list[Node]) -> None:
    """Versions and config of all nodes must be the head's; nobody may hide behind the loopback interface."""
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
    """Everybody's word. The store may be older than this attempt (torchrun's is) and still hold words of the last.

    So the head publishes a list of the words it has heard, each node answers to a list with its own word in it, and
    the list holds once all have answered; until then a late word makes a new list.
    """
    everybody = range(placement.num_nodes)
    store.set(f"node/{rank}", json.dumps(asdict(this)))
    heard: set[int] = set()
    while True:
        if rank == 0:
            heard = {other for other in everybody if _has(store, f"node/{other}")}
            if len(heard) == placement.num_nodes:
                words = store.multi_get([f"node/{other}" for other in everybody])
                store.set("list", json.dumps([json.loads(word) for word in words]))
        if _has(store, "list"):
            nodes = [Node(**word) for word in json.loads(store.get("list"))]
            if rank < len(nodes) and nodes[rank].id == this.id:
                name = hashlib.sha256("".join(node.id for node in nodes).encode()).hexdigest()
                store.set(f"answer/{name}/{rank}", "")
                if rank == 0 and store.check([f"answer/{name}/{other}" for other in everybody]):
                    store.set(f"holds/{name}", "")
                if _has(store, f"holds/{name}"):
                    return nodes
        missing = f"; missing: node {', '.join(str(other) for other in everybody if other not in heard)}"
        _wait_a_moment(
            deadline,
            signals,
            f"Not all of {placement.num_nodes} machines came to {placement.master_addr}:{placement.master_port} in "
            f"time (cluster.join_timeout){missing if rank == 0 else ''}. Are they started with the same --master-addr, "
            "--master-port and --num-nodes?",
        )


def _has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except Exception as error:  # torch's exceptions have no common base but RuntimeError
        raise TrainingFailedError(
            f"The head's store no longer answers ({_first_line(error)}); did the head stop? Its output says why."
        ) from None


def _this_node(config: Config, placement: Placement, here: network.Endpoint) -> Node:
    machine = hardware.detect()
    boot = Path("/proc/sys/kernel/random/boot_id")
    return Node(
        name=socket.gethostname(),
        address=here.address,
        interface=here.interface,
        id=uuid.uuid4().hex,
        job=placement.job,
        boot=boot.read_text().strip() if boot.exists() else platform.node(),
        num_workers=hardware.plan(config).num_workers,
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


def _connect(placement: Placement, deadline: float, signals: Signals) -> tuple[Any, int | None]:
    """(the store, this node's rank if it is known already). The head makes the store unless torchrun has."""
    host, port, rank = placement.master_addr, placement.master_port, placement.rank
    if not placement.store_is_there and (rank == 0 or (rank is None and network.is_own_address(host, port))):
        try:
            return _serve(host, port), 0
        except OSError as error:
            if rank == 0 or error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"The head cannot listen at {host}:{port} ({error.strerror}); choose another --master-port, or "
                    "give an address of this machine with --master-addr."
                ) from None
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            break
        except OSError as error:
            own = " (an address of this machine itself)" if network.is_own_address(host, port) else ""
            _wait_a_moment(
                deadline,
                signals,
                f"The head at {host}:{port}{own} did not answer in time ({error.strerror or error}); is it started, "
                "and is the port open between the machines?",
            )
    try:
        return _client(host, port, STORE_TIMEOUT), rank
    except RuntimeError as error:
        raise UserError(
            f"What listens at {host}:{port} is not the head of a run ({_first_line(error)}); choose another "
            "--master-port."
        ) from None


def _serve(host: str, port: int) -> Any:
    """A store that listens at the head's address only, not at all of the machine's."""
    import torch.distributed as dist

    address = network.resolve(host, port)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _client(host: str, port: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _prefixed(prefix: str, store: Any) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(prefix, store)


def _wait_a_moment(deadline: float, signals: Signals, sentence_if_late: str) -> None:
    if signals.received is not None:
        raise Interrupted
    if time.monotonic() > deadline:
        raise TrainingFailedError(sentence_if_late)
    time.sleep(SECONDS_BETWEEN_TRIES)


def _label(rank: int, name: str) -> str:
    return f"Node {rank} ({name})"


def _first_line(error: BaseException) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0][:200]
    return type(error).__name__
