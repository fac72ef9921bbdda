"""All nodes of a run, from the start of the first to the end of the last, and again if that was a failure."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from rl_cluster_benchmark.cluster.launch.processes import Lines, NodeProcess
from rl_cluster_benchmark.config import ClusterConfig
from rl_cluster_benchmark.run.stop import Signals

WRONG_INPUT = 2
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_END = 30.0  # for the others to notice that one has ended, beyond cluster.timeout
SECONDS_TO_OBEY = 30.0  # from a signal to the end
SECONDS_BEFORE_RESTART = 1.0


class Engine(Protocol):
    """Starts the nodes of one attempt, wherever they run."""

    def available(self, wanted: int) -> int:
        """How many machines could take part now, at most `wanted`."""
        ...

    def start(self, num_nodes: int, attempt: int, lines: Lines) -> Sequence[NodeProcess]: ...


def supervise(engine: Engine, cluster: ClusterConfig, num_nodes: int, signals: Signals) -> int:
    """Returns the exit status of the run."""
    status, nodes = 1, num_nodes
    for attempt in range(cluster.max_restarts + 1):
        status = run_once(engine, nodes, attempt, cluster.timeout, signals)
        if status in (0, WRONG_INPUT) or signals.received is not None:
            break
        if attempt == cluster.max_restarts:
            say(f"The run failed {attempt + 1} times; cluster.max_restarts = {cluster.max_restarts} allows no more.")
            break
        time.sleep(SECONDS_BEFORE_RESTART)
        there = engine.available(num_nodes)
        if there < num_nodes and there < (cluster.min_nodes or num_nodes):
            say(f"Only {there} of {num_nodes} machines answer; cluster.min_nodes = {cluster.min_nodes or num_nodes}.")
            break
        nodes = there
        fewer = f" with {nodes} of {num_nodes} machines" if nodes < num_nodes else ""
        say(f"Restart {attempt + 1} of {cluster.max_restarts}{fewer}, from the last checkpoint.")
    return 128 + signals.received if signals.received is not None else status


def run_once(engine: Engine, num_nodes: int, attempt: int, timeout: float, signals: Signals) -> int:
    """0 if all nodes ended well, 2 if one refused its input, else the worst status."""
    lines: Lines = queue.SimpleQueue()
    nodes = engine.start(num_nodes, attempt, lines)
    try:
        statuses = watch(nodes, lines, timeout, signals)
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
        for node in nodes:
            node.close()
        show(lines)
    failed = {node.name: status for node, status in zip(nodes, statuses, strict=True) if status != 0}
    if failed:
        say("Ended: " + ", ".join(f"{name} with status {status}" for name, status in failed.items()) + ".")
    return WRONG_INPUT if WRONG_INPUT in statuses else max(statuses)


def watch(nodes: Sequence[NodeProcess], lines: Lines, timeout: float, signals: Signals) -> list[int]:
    """Show what they print until all have ended. Once one has, the others have a limited time to."""
    deadline: float | None = None
    is_told = False
    while any(node.poll() is None for node in nodes):
        show(lines)
        now = time.monotonic()
        if signals.received is not None and not is_told:
            is_told, deadline = True, now + SECONDS_TO_OBEY
            for node in nodes:
                node.stop(signals.received)
        if deadline is None and any(node.poll() is not None for node in nodes):
            deadline = now + timeout + SECONDS_TO_END
        if deadline is not None and now > deadline:
            late = [node.name for node in nodes if node.poll() is None]
            say(f"Still running, and ended now: {', '.join(late)}.")
            _end(nodes)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return [node.poll() or 0 for node in nodes]


def _end(nodes: Sequence[NodeProcess]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for node in nodes:
            if node.poll() is None:
                node.kill() if number == signal.SIGKILL else node.stop(number)
        deadline = time.monotonic() + 5
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def show(lines: Lines) -> None:
    while not lines.empty():
        name, line = lines.get()
        with contextlib.suppress(OSError):
            print(f"[{name}] {line}", flush=True)


def say(sentence: str) -> None:
    with contextlib.suppress(OSError):
        print(f"rlcb launch: {sentence}", file=sys.stderr, flush=True)
