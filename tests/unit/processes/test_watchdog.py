"""Who stands still, and who only waits for it."""

import os
import time

import pytest

from rl_cluster_benchmark.processes import watchdog
from rl_cluster_benchmark.processes.watchdog import Pulse, Watchdog

LIMIT = 0.05


@pytest.fixture
def pulses():
    made = [Pulse(), Pulse(), Pulse()]
    for pulse in made:
        pulse._beat(is_waiting=False)
    yield made
    for pulse in made:
        pulse.close()


def look(watch, pulses, but=()):
    """After a silence that is too long."""
    assert watch.hung(pulses, but) == []
    time.sleep(2 * LIMIT)
    return watch.hung(pulses, but)


def test_those_who_wait_are_not_to_blame(pulses):
    pulses[0]._beat(is_waiting=True)
    pulses[2]._beat(is_waiting=True)
    assert look(Watchdog(LIMIT), pulses) == [1]


def test_all_are_when_they_wait_for_each_other(pulses):
    for pulse in pulses:
        pulse._beat(is_waiting=True)
    assert look(Watchdog(LIMIT), pulses, but={2}) == [0, 1]


def test_one_that_waits_while_another_works_is_not_named(pulses):
    watch = Watchdog(LIMIT)
    pulses[0]._beat(is_waiting=True)
    watch.hung(pulses, ())
    time.sleep(2 * LIMIT)
    for pulse in pulses[1:]:
        pulse._beat(is_waiting=False)
    assert watch.hung(pulses, ()) == []


def test_when_the_parent_itself_was_stopped_nobody_is_to_blame(pulses, monkeypatch):
    monkeypatch.setattr(watchdog, "OWN_PAUSE", LIMIT)
    assert look(Watchdog(LIMIT), pulses) == []


def test_a_start_takes_longer(pulses):
    assert look(Watchdog(LIMIT), [Pulse()]) == []


def test_a_process_that_is_stopped_or_gone_is_told_of(pulses):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        os.kill(child, 19)
        time.sleep(0.05)
        assert "is stopped: kill -CONT" in pulses[0].stack_of(child)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert "is gone" in pulses[0].stack_of(child)
