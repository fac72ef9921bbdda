"""The launcher and the nodes it has started: whom it waits for, what ends them, and when it starts them again."""

import queue
import signal
import sys

import pytest

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.tools.launch import supervise
from rl_cluster_benchmark.tools.launch.launch_processes import LocalProcess
from rl_cluster_benchmark.tools.launch.ssh import port_of

CONFIG = Config.model_validate({"mode": "distributed", "cluster": {"timeout": 2.0}})
FOLLOWER = "pass"
# As a node: the first signal asks it to end in good order, a second one ends it at once.
HEAD = """
import os, signal, sys, time
def handle(number, frame):
    global ends_at, status
    if status:
        os._exit(1)
    status, ends_at = 128 + number, time.monotonic() + 3
status, ends_at = 0, time.monotonic() + 4
signal.signal(signal.SIGTERM, handle)
print("ready", flush=True)
while time.monotonic() < ends_at:
    time.sleep(0.05)
sys.exit(status)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def start(monkeypatch):
    """Start Python programs as nodes."""
    monkeypatch.setattr(supervise, "SECONDS", 0.0)
    started = []

    def begin(*programs):
        lines = queue.SimpleQueue()
        nodes = [LocalProcess(f"node {n}", [sys.executable, "-c", text], lines, {}) for n, text in enumerate(programs)]
        started.extend(nodes)
        return nodes, lines

    yield begin
    for node in started:
        node.kill()
        node.close()


def test_a_node_that_has_ended_well_hurries_nobody(start):
    nodes, lines = start(HEAD, FOLLOWER)
    assert supervise.watch(nodes, lines, CONFIG, Signals()) == [0, 0]


def test_a_signal_is_given_once_and_there_is_time_to_save(start):
    nodes, lines = start(HEAD)
    assert lines.get(timeout=60) == ("node 0", "ready")
    signals = Signals()
    signals.receive(signal.SIGTERM)
    assert supervise.watch(nodes, lines, CONFIG, signals) == [128 + signal.SIGTERM]


def test_nodes_that_do_not_notice_a_failure_are_told_and_ended_if_they_hang(start, monkeypatch):
    monkeypatch.setattr(supervise, "longest_hang", lambda config: 5.0)
    nodes, lines = start(HEAD, DEAF)
    assert sorted(lines.get(timeout=60)[0] for _ in nodes) == ["node 0", "node 1"]
    failing, _ = start("raise SystemExit(1)")
    statuses = supervise.watch([*failing, *nodes], lines, CONFIG, Signals())
    assert statuses == [1, 128 + signal.SIGTERM, 128 + signal.SIGKILL]


@pytest.mark.parametrize(("statuses", "attempts"), [([2], 1), ([1, 2, 2, 0], 4), ([1, 2, 2, 2], 4)])
def test_only_the_first_attempt_can_have_a_wrong_input(start, monkeypatch, statuses, attempts):
    monkeypatch.setattr(supervise, "SECONDS_BEFORE_RESTART", 0.0)
    begun = []

    class Engine:
        def available(self, wanted):
            return wanted

        def start(self, num_nodes, attempt, lines):
            begun.append(attempt)
            return start(f"raise SystemExit({statuses[attempt]})")[0]

    status = supervise.supervise(Engine(), CONFIG, 1, Signals())
    assert (status, len(begun)) == (statuses[-1], attempts)


def test_each_attempt_has_a_port_that_can_be_listened_at():
    """And none of another run whose ports begin next to it."""
    mine, next_to_it = ([port_of(first, attempt) for attempt in range(6)] for first in (65_533, 65_534))
    assert mine[0] == 65_533
    assert len({*mine, *next_to_it}) == 12
    for port in (*mine[1:], port_of(65_535, 1), port_of(1, 1)):
        assert 1024 <= port < 65_536
