"""How fast a run would be on many machines: pure functions of what was measured on a few.

An update on n machines takes the work of one machine, the wait for the slowest, and the sums over the network. Each
is one formula below; `ASSUMPTIONS` says in words what they take for granted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

ALLREDUCE, COMPRESSED, LOCAL_SGD, ASYNCHRONOUS = "allreduce", "allreduce bfloat16", "local_sgd", "async"
STRATEGIES = (ALLREDUCE, COMPRESSED, LOCAL_SGD, ASYNCHRONOUS)
IN_STEP = (ALLREDUCE, COMPRESSED)  # all machines take each step of the optimiser together
SEGMENTS = 2  # Gloo cuts each machine's share of a vector into two, and has both under way at once
EXACT_BYTES = 4 * 64  # of a compressed vector, sent beside it: loss statistics stay float32

ASSUMPTIONS = (
    "Weak scaling: every machine keeps its environments and its share of each minibatch, so the global minibatch, and "
    "with it the learning problem, grows with the machines; with local_sgd and async each machine steps alone, on "
    "minibatches as large as on one. Steps per second, not reward.",
    "A sum over n machines is Gloo's ring: 2 (n - 1) hops, each max(latency + s/bandwidth, 2 s/bandwidth), for "
    "segments of s = bytes/2n; latency is a round trip and Gloo's own cost. Every link has the same latency and "
    "bandwidth, and carries nothing else.",
    "Work between two sums is normally distributed, independent from machine to machine: between them with one "
    "standard deviation, from moment to moment with another. A sum waits for the slowest.",
    "No machine fails, and the head keeps up with what all of them report.",
    "async (A3C, IMPALA): averages are made beside the training; nobody waits for them or for anybody.",
)


@dataclass(frozen=True)
class Network:
    """A network between machines, as Gloo makes use of it."""

    latency: float  # seconds that a hop takes however little it carries: a round trip, and what Gloo needs
    bandwidth: float  # bytes per second of a link
    cast_seconds: float = 0.0  # what rounding a vector to bfloat16 and back costs, beyond sending it


@dataclass(frozen=True)
class MachineWork:
    """The work of one machine in one update, as measured without any other machine."""

    steps: float  # of its environments
    rollout_seconds: float
    minibatch_seconds: float
    minibatches: int  # in all epochs
    vector_bytes: int  # of a gradient
    state_vectors: int = 3  # averaged by local_sgd: parameters and, with Adam, two moments
    small_sums: float = 6.5  # of an update besides its gradients: counters, moments, episodes
    small_sums_alone: float = 4.5  # the same with local_sgd, where most of them stay inside the machine

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + self.minibatches * self.minibatch_seconds


@dataclass(frozen=True)
class Spread:
    """How much speeds differ, as relative standard deviations."""

    between: float = 0.0  # of the machines' mean speeds
    jitter: float = 0.0  # of one machine's pieces of work, from one to the next
    piece_seconds: float = 1.0  # how long such a piece takes


@dataclass(frozen=True)
class Projection:
    """What one strategy gives on some machines; times are of an update."""

    nodes: int
    work: float
    waiting: float
    communication: float
    steps_per_second: float
    efficiency: float  # of `nodes` times one machine

    @property
    def seconds(self) -> float:
        return self.work + self.waiting + self.communication


def ring_seconds(nodes: int, size: float, network: Network) -> float:
    """Return the time of one all-reduce of `size` bytes, once all machines have come to it."""
    if nodes == 1:
        return 0.0
    sending, latency = size / (SEGMENTS * nodes) / network.bandwidth, network.latency
    return 2 * ((nodes - 1) * max(latency + sending, SEGMENTS * sending) + min(latency, sending))


def network_from(nodes: int, small_seconds: float, size: int, seconds: float) -> Network:
    """Return the network that explains the times of an all-reduce of nearly nothing and of one of `size` bytes."""
    hops, half = nodes - 1, seconds / 2
    latency = small_seconds / 2 / hops
    sending = (half - latency) / (SEGMENTS * hops)  # if sending takes longer than a hop of nothing
    if sending < latency:
        sending = (half - hops * latency) / nodes
    return Network(latency, size / (SEGMENTS * nodes) / max(sending, 1e-12))


@cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of standard normal variables: the integral of 1 - F^n - (1 - F)^n for x > 0."""
    if count == 1:
        return 0.0
    from scipy.integrate import quad
    from scipy.special import ndtr

    return float(quad(lambda x: 1 - ndtr(x) ** count - ndtr(-x) ** count, 0, 12, limit=200)[0])


def waiting_seconds(nodes: int, seconds: float, spread: Spread) -> float:
    """Return the wait for the slowest machine after so much work: jitter averages out over a longer stretch."""
    if seconds == 0:
        return 0.0
    jitter = spread.jitter * math.sqrt(spread.piece_seconds / seconds)
    return seconds * math.hypot(spread.between, jitter) * expected_maximum(nodes)


def project(
    strategy: str, nodes: int, work: MachineWork, network: Network, spread: Spread, *, sync_every: int = 8
) -> Projection:
    """Project one strategy to so many machines; `sync_every` is that of local_sgd and of asynchronous averages."""
    waiting = communication = 0.0
    if nodes > 1 and strategy in IN_STEP:
        waiting = work.minibatches * waiting_seconds(nodes, work.minibatch_seconds, spread)
        waiting += waiting_seconds(nodes, work.rollout_seconds, spread)
        communication = work.minibatches * _gradient_seconds(strategy, nodes, work, network)
        communication += work.small_sums * ring_seconds(nodes, 0, network)
    elif nodes > 1 and strategy == LOCAL_SGD:
        waiting = waiting_seconds(nodes, work.seconds, spread)
        average = work.state_vectors * ring_seconds(nodes, work.vector_bytes, network)
        average += ring_seconds(nodes, 0, network)
        communication = work.small_sums_alone * ring_seconds(nodes, 0, network) + average / sync_every
    seconds = work.seconds + waiting + communication
    return Projection(
        nodes, work.seconds, waiting, communication, nodes * work.steps / seconds, efficiency=work.seconds / seconds
    )


def _gradient_seconds(strategy: str, nodes: int, work: MachineWork, network: Network) -> float:
    if strategy == COMPRESSED:
        return ring_seconds(nodes, work.vector_bytes / 2 + EXACT_BYTES, network) + network.cast_seconds
    return ring_seconds(nodes, work.vector_bytes, network)


def updates_between_averages(
    strategy: str, nodes: int, work: MachineWork, network: Network, *, sync_every: int
) -> float | None:
    """Return how many updates a machine makes between averages: with async as many as the network needs for one."""
    if strategy not in (LOCAL_SGD, ASYNCHRONOUS):
        return None
    average = ring_seconds(nodes, work.vector_bytes, network) if strategy == ASYNCHRONOUS else 0.0
    return max(float(sync_every), average / work.seconds)
