"""NaN and infinity: found wherever they are, and what they would have changed stays as it was. Runs: tests/faults."""

import math

import pytest
import torch
from helpers.scripted import ScriptedEnv

from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.experience.rollout import Collector, count_bad
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.learning.losses import SKIPPED, left_out, mean_of
from rl_cluster_benchmark.nets.models import make_model


def learner(on_nan, reward=1.0):
    config = Config.model_validate(
        {
            "env": {"name": "Catch-v0", "num_envs": 2},
            "training": {"n_steps": 8, "batch_size": 8, "n_epochs": 2, "on_nan": on_nan},
        }
    )
    env = ScriptedEnv([[([0.0, reward, 1.0], "terminated")]] * 2)
    torch.manual_seed(0)
    model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, torch.float32)
    algorithm = PPO(config, model, env_ids=[0, 1], micro_batch=8, reduce=Alone())
    collector = Collector(env, model, n_steps=8, env_ids=[0, 1], seed=1, device="cpu", clock=PhaseClock())
    return algorithm, collector


def state(algorithm):
    return [vector.clone() for vector in algorithm.on_policy.learner.vectors()]


def test_a_bad_gradient_changes_nothing():
    algorithm, collector = learner("skip")
    collector.collect(0, lambda: False)
    rollout = collector.rollout
    rollout.log_probs[3, 1] = math.nan  # of one sample: one minibatch of each epoch is spoilt
    before = state(algorithm)
    losses = algorithm.update(rollout, index=0, progress=0.0, interrupted=lambda: False)
    assert losses[SKIPPED] == 2
    assert math.isfinite(losses["policy_loss"]), "of the minibatches that were learned from"
    assert all(bool(vector.isfinite().all()) for vector in state(algorithm))
    assert not torch.equal(before[0], state(algorithm)[0])
    rollout.log_probs[:] = math.nan
    before = state(algorithm)
    losses = algorithm.update(rollout, index=1, progress=0.0, interrupted=lambda: False)
    assert losses[SKIPPED] == 4
    assert math.isnan(losses["policy_loss"])
    assert all(torch.equal(a, b) for a, b in zip(before, state(algorithm), strict=True))


def test_by_default_it_ends_the_run():
    algorithm, collector = learner("stop")
    collector.collect(0, lambda: False)
    collector.rollout.log_probs[:] = math.nan
    before = state(algorithm)
    with pytest.raises(TrainingFailedError, match="became NaN or infinite"):
        algorithm.update(collector.rollout, index=0, progress=0.0, interrupted=lambda: False)
    assert all(torch.equal(a, b) for a, b in zip(before, state(algorithm), strict=True))


def test_rewards_and_observations_are_counted_and_such_episodes_are_not():
    _, collector = learner("skip", reward=math.inf)
    rollout = collector.collect(0, lambda: False)
    is_bad, rewards, observations = count_bad(rollout)
    assert (is_bad, observations) == (1.0, 0.0)
    assert rewards == float((~rollout.rewards.isfinite()).sum()) > 0
    assert rollout.episodes == [], "their rewards are infinite"
    rollout.rewards.zero_()
    assert count_bad(rollout) == [0.0, 0.0, 0.0]
    rollout.observations[2, 1, 0] = math.nan
    assert count_bad(rollout) == [1.0, 0.0, 1.0]
    rollout.observations[2, 1, 0] = 0.0
    rollout.last_observations[0, 0] = math.nan
    assert count_bad(rollout) == [1.0, 0.0, 0.0], "it is counted with the rollout that begins with it"
    assert count_bad(None) == [0.0, 0.0, 0.0]
    with pytest.raises(TrainingFailedError, match="3 rewards and 0 observations that are NaN or infinite"):
        left_out((3.0, 0.0), "stop")


def test_means_are_of_what_was_learned_from():
    steps = [{"loss": 1.0, "skipped_updates": 0.0}, {"loss": math.nan, "skipped_updates": 1.0}]
    assert mean_of([*steps, {"loss": 3.0, "skipped_updates": 0.0, "bad_rewards": 2.0}]) == {
        "loss": 2.0, "skipped_updates": 1.0, "bad_rewards": 2.0,
    }  # fmt: skip
