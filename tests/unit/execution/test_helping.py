"""Workers that have made their rollout compute features for the others."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from helpers.commands import needs_native

from rl_cluster_benchmark.config.schema import Config, HardwareConfig, ModelConfig
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.in_step.helping import ANSWERED, FINISHED, TAKEN, Helping, SharedHelp, helpers_half
from rl_cluster_benchmark.execution.in_step.work_sharing import SharedWork, WorkSharing
from rl_cluster_benchmark.execution.loop import Worker
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.execution.task import Task, deal
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.processes import waiting

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


def answers(shared):
    """To each worker."""
    return shared.memory["posts"][:, ANSWERED].tolist()


def test_who_is_done_takes_over_images_of_who_is_not(workers):
    shared, network, (slow, fast, _) = workers
    shared.memory["workers"][2, FINISHED] = 100  # not in this one
    for index in range(3):
        network.seen.clear()
        in_threads((play, slow, SHARDS[0], index, 0.02), (play, fast, SHARDS[1], index))
        assert ("1", 2) in network.seen, "the second worker looked at two images of the first"
        assert ("0", 1) in network.seen, "which then looked at one of its three"
        assert sum(count for _, count in network.seen) == STEPS * 5, "each image was looked at once"
        assert not shared.memory["posts"][:, TAKEN].any()
    assert answers(shared)[1] == 0
    assert sorted(iter(shared.free.take, None)) == list(range(3))


def test_the_farthest_behind_is_helped_first(workers):
    shared, network, (slower, slow, fast) = workers
    in_threads(
        (play, slower, SHARDS[0], 0, 0.03), (play, slow, SHARDS[1], 0, 0.02), (play, fast, SHARDS[2], 0)
    )  # fmt: skip
    to_slower, to_slow, _ = answers(shared)
    assert to_slower > to_slow
    assert sum(count for _, count in network.seen) == STEPS * 6


def test_of_two_that_are_done_one_helps_the_last(workers):
    shared, network, (slow, fast, also_fast) = workers
    in_threads((play, slow, SHARDS[0], 0, 0.03), (play, fast, SHARDS[1], 0), (play, also_fast, SHARDS[2], 0))
    assert answers(shared)[0] > 0
    assert len({name for name, _ in network.seen if name != "0"} & {"1", "2"}) == 2, "both played"
    assert sum(count for _, count in network.seen) == STEPS * 6, "each image was looked at once"


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_both_get_an_image_and_the_helped_one_no_more_than_its_helper(count):
    theirs = helpers_half(slice(7, 7 + count))
    own = theirs.start - 7
    assert theirs.stop == 7 + count
    assert 0 < own <= theirs.stop - theirs.start <= own + 1


def test_an_environment_alone_cannot_be_shared(workers):
    shared, network, (first, second, alone) = workers
    in_threads((play, first, SHARDS[0], 0), (play, second, SHARDS[1], 0), (play, alone, SHARDS[2], 0, 0.02))
    assert ("2", 1) in network.seen
    assert answers(shared)[2] == 0


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
    model = make_model(config, (64, 64, 3), 15, HardwareConfig(), torch.float32, "native")
    observations = torch.randint(0, 256, (19, 64, 64, 3), dtype=torch.uint8)
    with torch.inference_mode():
        together = model.features(observations)
        for first in (1, 2, 9, 16, 18):
            parts = [model.features(part) for part in (observations[:first], observations[first:])]
            assert torch.equal(torch.cat(parts), together)


@needs_native
def test_with_shared_work_and_the_network_in_c_workers_do_help(monkeypatch):
    """Of two whose rollouts are the same as without help, one is slow."""
    config = Config.model_validate(
        {"env": {"name": "coinrun", "num_envs": 4}, "training": {"n_steps": 12}, "parallel": {"num_workers": 2}}
        | {"mode": "parallel", "hardware": {"precision": "float32"}}
    )
    plan = replace(planning.plan(config), num_workers=2, engine="native", precision="float32", balance=0.5)
    task, shards = Task.of(config), deal(4, 2)
    work = SharedWork(task, shards, config, plan)
    memory = SharedMemoryReducer.allocate(2, task.num_parameters + 64, 256, 24)
    rollouts = {}
    for with_help in (False, True):
        workers = []
        for rank in range(2):
            reduce = SharedMemoryReducer(memory, rank, PhaseClock())
            sharing = WorkSharing(work, rank, reduce)
            worker = Worker.build(
                config, plan, env_ids=shards[rank], reduce=reduce, clock=PhaseClock(), incarnation=0, checkpoint=None,
                sharing=sharing,
            )  # fmt: skip
            assert isinstance(worker.collector.helping, Helping)
            if not with_help:
                worker.collector.helping = None
            workers.append(worker)
        slow = workers[0].collector.env
        step = slow.step
        monkeypatch.setattr(slow, "step", lambda actions, step=step: time.sleep(0.02) or step(actions))
        in_threads(*((worker.collector.collect, 0, lambda: False) for worker in workers))
        rollouts[with_help] = {name: work.experience[name].clone() for name in ("actions", "log_probs", "values")}
    assert answers(work.help)[0] > 0
    for name, expected in rollouts[False].items():
        assert torch.equal(rollouts[True][name], expected), name


def test_without_the_network_in_c_nobody_helps():
    config = Config.model_validate({"env": {"name": "Catch-v0", "num_envs": 4}, "parallel": {"balance": 0.5}})
    plan = replace(planning.plan(config), num_workers=2, balance=0.5)
    assert SharedWork(Task.of(config), deal(4, 2), config, plan).help is None


def test_a_pinned_worker_does_not_nap_while_it_waits(monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(waiting, "_spin_seconds", waiting.SPIN_SECONDS)
    for expect_naps in (True, False):
        end = time.perf_counter() + 0.02
        waiting.wait_until(lambda end=end: time.perf_counter() > end, PhaseClock())
        assert bool(naps) == expect_naps
        assert all(waiting.SHORTEST_NAP <= nap <= waiting.LONGEST_NAP for nap in naps)
        naps.clear()
        waiting.keep_core()
