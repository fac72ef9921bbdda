"""Workers that have made their rollout compute features for the others."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from conftest import needs_native

from rl_cluster_benchmark.config import HardwareConfig, ModelConfig
from rl_cluster_benchmark.execution.helping import ANSWERED, FINISHED, IS_HELPED, Helping, SharedHelp
from rl_cluster_benchmark.models import make_model
from rl_cluster_benchmark.timing import PhaseClock

STEPS, SHARDS = 6, (slice(0, 3), slice(3, 5), slice(5, 6))


class Features:
    """A network whose every image is one number; notes which thread has looked at how many."""

    def __init__(self):
        self.seen = []

    def features(self, observations):
        self.seen.append((threading.current_thread().name, len(observations)))
        return observations.float().mul(2).unsqueeze(-1)


@pytest.fixture
def workers():
    """Of three, with as many environments as shards have; observation [t, n] is 10 t + n."""
    shared = SharedHelp(len(SHARDS), 6, width=1)
    observations = 10 * torch.arange(STEPS).unsqueeze(1) + torch.arange(6)
    network = Features()
    return shared, network, [Helping(shared, rank, SHARDS, observations, network, PhaseClock()) for rank in range(3)]


def play(worker, shard, index, pause=0.0, steps=STEPS):
    for t in range(steps):
        time.sleep(pause)
        expected = [[2.0 * (10 * t + n)] for n in range(shard.start, shard.stop)]
        assert worker.features(t).tolist() == expected
    worker.finish(index)


def in_threads(*calls):
    errors = []

    def catch(call, args):
        try:
            call(*args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catch, args=(call, args), name=str(i)) for i, (call, *args) in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    assert not errors


def test_who_is_done_takes_over_half_of_the_images_of_who_is_not(workers):
    shared, network, (slow, fast, _) = workers
    board = shared.memory["board"]
    board[2, FINISHED] = 100  # not in this one
    for index in range(3):
        network.seen.clear()
        in_threads((play, slow, SHARDS[0], index, 0.02), (play, fast, SHARDS[1], index))
        assert ("1", 1) in network.seen, "the second worker looked at one image of the first"
        assert ("0", 2) in network.seen, "which then looked at two of its three"
        assert sum(count for _, count in network.seen) == STEPS * 5, "each image was looked at once"
        assert not board[:, IS_HELPED].any()
    assert board[1, ANSWERED] == 0
    assert sorted(iter(shared.unhelped.take, None)) == [0, 1, 2]


def test_the_farthest_behind_is_helped_and_by_one_only(workers):
    shared, network, (slower, slow, fast) = workers
    in_threads(
        (play, slower, SHARDS[0], 0, 0.03), (play, slow, SHARDS[1], 0, 0.02), (play, fast, SHARDS[2], 0)
    )  # fmt: skip
    answered = shared.memory["board"][:, ANSWERED].tolist()
    assert answered[0] > answered[1]
    assert sum(count for _, count in network.seen) == STEPS * 6


def test_an_environment_alone_cannot_be_shared(workers):
    shared, network, (first, second, alone) = workers
    in_threads((play, first, SHARDS[0], 0), (play, second, SHARDS[1], 0), (play, alone, SHARDS[2], 0, 0.02))
    assert ("2", 1) in network.seen
    assert shared.memory["board"][2, ANSWERED] == 0


def test_a_rollout_that_is_given_up_holds_up_nobody(workers):
    _, _, (slow, fast, third) = workers
    in_threads(
        (play, slow, SHARDS[0], 0, 0.05, 2), (play, fast, SHARDS[1], 0), (play, third, SHARDS[2], 0)
    )  # fmt: skip


@needs_native
@pytest.mark.parametrize("architecture", ["impala", "nature"])
def test_what_the_network_in_c_makes_of_an_image_does_not_depend_on_the_others(architecture):
    """Else the numbers would depend on who helped whom."""
    torch.manual_seed(0)
    config = ModelConfig(architecture=architecture)
    model = make_model(config, (64, 64, 3), 15, HardwareConfig(), torch.bfloat16, "native")
    observations = torch.randint(0, 256, (19, 64, 64, 3), dtype=torch.uint8)
    with torch.inference_mode():
        together = model.features(observations)
        for first in (1, 2, 9, 16, 18):
            parts = [model.features(part) for part in (observations[:first], observations[first:])]
            assert torch.equal(torch.cat(parts), together)
