"""All nodes of a run, from the start of the first to the end of the last, and again if that was a failure."""

from __future__ import annotations

import math
import queue
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.processes.watchdog import longest_hang
from rl_cluster_benchmark.tools.launch.launch_processes import Lines, NodeProcess, take_lines

WRONG_INPUT = 2
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS = 30.0  # beyond those in which nodes notice that one has failed, or that they hang themselves
SECONDS_BEFORE_RESTART = 1.0


NO_OTHER_HEAD = (
    "The first machine, {0}, does not answer, and the run is on its disk alone (cluster.shared_filesystem=false): no "
    "other machine can go on with it. Launch it again with --resume when {0} is back."
)


class Engine(Protocol):
    """Starts the nodes of one attempt, wherever they run."""

    # how many machines could take part now, at most `wanted`; it raises if none could go on with the run
    def available(self, wanted: int) -> int: ...
    def start(self, num_nodes: int, attempt: int, lines: Lines) -> Sequence[NodeProcess]: ...


def supervise(engine: Engine, config: Config, num_nodes: int, signals: Signals) -> int:
    """Run all attempts; return the exit status of the run."""
    cluster, status, nodes = config.cluster, 1, num_nodes
    for attempt in range(cluster.max_restarts + 1):
        status = run_once(engine, nodes, attempt, config, signals)
        # What was right at first cannot be wrong later: then it is a port that is taken, a disk that cannot be read.
        if status == 0 or (status == WRONG_INPUT and attempt == 0) or signals.has_come():
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
    return signals.status or status


def run_once(engine: Engine, num_nodes: int, attempt: int, config: Config, signals: Signals) -> int:
    """Run one attempt; return 0 if all nodes ended well, 2 if one refused its input, else the worst status."""
    lines: Lines = queue.SimpleQueue()
    nodes = engine.start(num_nodes, attempt, lines)
    try:
        statuses = watch(nodes, lines, config, signals)
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


def watch(nodes: Sequence[NodeProcess], lines: Lines, config: Config, signals: Signals) -> list[int]:
    """Show what the nodes print until all have ended; return their statuses.

    A node that has ended well leaves the others all the time they want: the head may have a last checkpoint to write.
    When one has failed, those that do not notice are told to end; they, and all when a signal has come, have as long
    for it as a node takes that hangs and ends itself. Nobody is told twice: that would mean at once.
    """
    failed_at = told_at = math.inf
    while any(node.poll() is None for node in nodes):
        show(lines)
        now = time.monotonic()
        if failed_at == math.inf and any(node.poll() not in (None, 0) for node in nodes):
            failed_at = now
        if told_at == math.inf and (signals.has_come() or now > failed_at + config.cluster.timeout + SECONDS):
            told_at = now
            for node in nodes:
                node.send(signals.received or signal.SIGTERM)
        if now > told_at + longest_hang(config) + SECONDS:
            late = [node for node in nodes if node.poll() is None]
            say(f"Still running, and ended now: {', '.join(node.name for node in late)}.")
            for node in late:
                node.kill()
            told_at = now
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return [node.poll() or 0 for node in nodes]


def show(lines: Lines) -> None:
    for name, line in take_lines(lines):
        print(f"[{name}] {line}", flush=True)


def say(sentence: str) -> None:
    print(f"rlcb launch: {sentence}", file=sys.stderr, flush=True)
