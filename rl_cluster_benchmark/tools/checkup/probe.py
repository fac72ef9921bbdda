"""On every machine at once: meet as a run would, and measure clocks, links, sums and one core's speed.

The sums are those of a run (machine_links.py), of a gradient of the IMPALA-CNN. Each has a time limit.
"""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from rl_cluster_benchmark.cluster.placement import Placement
from rl_cluster_benchmark.cluster.rendezvous import Node, gather
from rl_cluster_benchmark.cluster.store import first_line, limited
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.env.environments import PROCGEN
from rl_cluster_benchmark.execution.machines.machine_links import MachineLinks, MachineSeat
from rl_cluster_benchmark.machine import planning, process
from rl_cluster_benchmark.nets.models import make_model

GRADIENT = 626_256  # parameters of the IMPALA-CNN: 2.5 MB
SAMPLES = 64  # of a training pass
NUMBERS = 64  # of a small sum: as many as there are between the gradients of a run
PINGS, ECHOES = 10, 3
SECONDS_OF_SUMS, SECONDS_OF_PASSES = 1.0, 1.5
MOST_SUMS, WARM_UP = 100, 3
SECONDS_BEYOND = 30.0  # cluster.join_timeout, until a store that does not answer ends the probe


@dataclass(frozen=True)
class Link:
    """The connection from the head to a machine and back."""

    skew: float  # seconds that its clock is ahead of the head's
    round_trip: float  # seconds; half of it is how wrong `skew` may be
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Member:
    """A machine, as it says and as it was measured."""

    name: str
    address: str
    interface: str
    boot: str
    usable_cores: int
    cpu_model: str
    versions: dict[str, str | None]
    link: Link | None  # None: the head itself
    pass_seconds: float  # of a training pass of 64 samples on one core, median
    jitter: float  # relative standard deviation of such passes


@dataclass(frozen=True)
class Sums:
    """Median seconds of sums over all machines."""

    nodes: int
    size: int  # bytes of a gradient
    small: float  # of a sum of a few numbers
    gradient: float
    compressed: float  # of a gradient in bfloat16


@dataclass(frozen=True)
class Measurements:
    members: list[Member]
    sums: Sums | None  # None: there is one machine

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Measurements:
        members = [
            Member(**{**member, "link": Link(**member["link"]) if member["link"] else None})
            for member in content["members"]
        ]
        return cls(members, Sums(**content["sums"]) if content["sums"] else None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(config: Config, placement: Placement, signals: Signals) -> Measurements | None:
    """Measure, together with the other machines; return what all have measured on the head, None on the others."""
    limit = config.cluster.join_timeout + SECONDS_BEYOND
    with limited(limit, "The head's store did not answer any more."):
        store, prefix, rank, nodes = gather(config, placement, signals)
        store.set(f"python/{rank}", platform.python_version())
        pythons = [store.get(f"python/{other}").decode() for other in range(len(nodes))]
    seat = MachineSeat(
        node_rank=rank,
        num_nodes=len(nodes),
        first_worker=rank,
        total_workers=len(nodes),
        store=(placement.master_addr, placement.master_port),
        prefix=prefix,
        interface=nodes[rank].interface,
        timeout=config.cluster.timeout,
        compression="none",
    )
    process.prepare_process(1)
    passes = training_passes(config, SECONDS_OF_PASSES)
    speed = [statistics.median(passes), statistics.pstdev(passes) / statistics.mean(passes)]
    if len(nodes) == 1:
        return Measurements([_member(nodes[0], pythons[0], None, speed)], None)
    machine_links = MachineLinks(seat)
    try:
        links = _links(rank, len(nodes))
        sums = _sums(machine_links)
        speeds = machine_links.gather(torch.tensor([speed]))
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:  # in Gloo's own words
        raise TrainingFailedError(
            f"The machines lost each other while they were measured, or need more than {seat.timeout:g} s (--timeout) "
            f"for {GRADIENT * 4 / 1e6:.1f} MB ({first_line(error)})."
        ) from None
    if speeds is None:
        return None
    members = [_member(*each) for each in zip(nodes, pythons, links, speeds.tolist(), strict=True)]
    return Measurements(members, sums)


def training_passes(config: Config, seconds: float) -> list[float]:
    """Return the seconds of each forward and backward pass of 64 frames on one core, as a worker computes them."""
    plan = planning.compiled(config, planning.plan(config))
    torch.manual_seed(0)
    precision = process.dtype(plan.precision)
    model = make_model(
        config.model, PROCGEN.observation_shape, PROCGEN.num_actions, config.hardware, precision, plan.engine
    )
    frames = torch.randint(0, 256, (SAMPLES, *PROCGEN.observation_shape), dtype=torch.uint8)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 2 * WARM_UP:
        start = time.perf_counter()
        features, back = model.pass_through(frames)
        back(features)
        times.append(time.perf_counter() - start)
    return times[WARM_UP:]


def _links(rank: int, num_nodes: int) -> list[Link | None]:
    """Measure the head's links one after the other; a machine answers with its clock, then with what it gets."""
    if rank == 0:
        return [None, *(_ask(other) for other in range(1, num_nodes))]
    clock, load = torch.zeros(1, dtype=torch.float64), torch.zeros(GRADIENT)
    for _ in range(PINGS):
        dist.recv(clock, src=0)
        clock[0] = time.time()
        dist.send(clock, dst=0)
    for _ in range(ECHOES):
        dist.recv(load, src=0)
        dist.send(load, dst=0)
    return []


def _ask(other: int) -> Link:
    clock, load = torch.zeros(1, dtype=torch.float64), torch.zeros(GRADIENT)
    answers = []
    for _ in range(PINGS):
        start = time.time()
        dist.send(clock, dst=other)
        dist.recv(clock, src=other)
        end = time.time()
        answers.append((end - start, clock.item() - (start + end) / 2))
    round_trip, skew = min(answers)  # the quickest answer says most about the clock
    echoes = []
    for _ in range(ECHOES):
        start = time.perf_counter()
        dist.send(load, dst=other)
        dist.recv(load, src=other)
        echoes.append(time.perf_counter() - start)
    return Link(skew, round_trip, 2 * load.nbytes / max(min(echoes) - round_trip, 1e-9))


def _sums(machine_links: MachineLinks) -> Sums:
    gradient, numbers = torch.zeros(GRADIENT), torch.zeros(NUMBERS, dtype=torch.float64)
    small, plain = (_median_seconds(machine_links, tensor) for tensor in (numbers, gradient))
    machine_links.seat = replace(machine_links.seat, compression="bfloat16")
    return Sums(machine_links.seat.num_nodes, gradient.nbytes, small, plain, _median_seconds(machine_links, gradient))


def _median_seconds(machine_links: MachineLinks, tensor: torch.Tensor) -> float:
    """Return the median time of as many sums as the head finds time for."""
    for _ in range(WARM_UP):
        start = time.perf_counter()
        machine_links.sum(tensor)
        last = time.perf_counter() - start
    count = torch.tensor([min(MOST_SUMS, 2 + int(SECONDS_OF_SUMS / last))])
    dist.broadcast(count, src=0)
    times = []
    for _ in range(int(count)):
        start = time.perf_counter()
        machine_links.sum(tensor)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _member(node: Node, python: str, link: Link | None, speed: list[float]) -> Member:
    return Member(
        name=node.name,
        address=node.address,
        interface=node.interface,
        boot=node.boot,
        usable_cores=node.usable_cores,
        cpu_model=node.cpu_model,
        versions=node.versions | {"python": python},
        link=link,
        pass_seconds=speed[0],
        jitter=speed[1],
    )
