"""Auto-reset, truncation and reward normalisation, on an environment whose returns are known by hand."""

import numpy as np
import pytest
import torch
from helpers.scripted import ScriptedEnv, targets

from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.experience.returns import RewardNormalizer
from rl_cluster_benchmark.experience.rollout import Collector, Episode, sample
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.nets.models import ActorCritic

SCRIPTS = [
    [([1.0, 2.0, 3.0], "terminated"), ([5.0, 5.0], "truncated")],
    [([0.0, 4.0, 0.0, 4.0, 0.0], "truncated")],
]


def known_values():
    """The value of an observation [environment, episode, step] is 100 * episode + 10 * step + environment."""
    model = ActorCritic(torch.nn.Identity(), 3, ScriptedEnv.num_actions)
    with torch.no_grad():
        model.policy_head.weight.zero_()
        model.value_head.weight.copy_(torch.tensor([[1.0, 100.0, 10.0]]))
    return model


def collector(n_steps, scripts=SCRIPTS):
    return Collector(
        ScriptedEnv(scripts),
        known_values(),
        n_steps=n_steps,
        env_ids=range(len(scripts)),
        seed=0,
        device="cpu",
        clock=PhaseClock(),
    )


def never():
    return False


def test_the_reset_transition_is_not_experience():
    rollout = collector(8).collect(0, never)
    # Environment 0: three steps, a reset, two steps, a reset, a step. Environment 1: five steps, a reset, two steps.
    assert rollout.valid[:, 0].tolist() == [True, True, True, False, True, True, False, True]
    assert rollout.valid[:, 1].tolist() == [True] * 5 + [False] + [True] * 2
    assert rollout.num_steps == 13
    assert rollout.episodes == [Episode(6.0, 3, 2, 0), Episode(8.0, 5, 4, 1), Episode(10.0, 2, 5, 0)]


def test_a_reset_on_the_border_of_two_rollouts_is_masked_in_the_second():
    collecting = collector(3)
    first = collecting.collect(0, never)
    assert bool(first.terminated[2, 0])
    assert first.valid.all()
    second = collecting.collect(1, never)
    assert second.valid[:, 0].tolist() == [False, True, True]
    assert second.episodes == [Episode(8.0, 5, 1, 1), Episode(10.0, 2, 2, 0)]


def test_truncation_bootstraps_from_the_true_last_frame_and_termination_from_nothing():
    rollout = collector(8).collect(0, never)
    advantages, _ = targets(rollout, gamma=0.5, gae_lambda=0.0)
    # The last step of the terminated episode: reward 3, value of its observation [0, 0, 2] is 20.
    assert float(advantages[2, 0]) == 3 - 20
    # The last step of the truncated one: reward 5, value of [0, 1, 1] is 110, of its last frame [0, 1, 2] is 120.
    assert float(advantages[5, 0]) == 5 + 0.5 * 120 - 110
    # Environment 1: reward 0, value of [1, 0, 4] is 41, of its last frame [1, 0, 5] is 51.
    assert float(advantages[4, 1]) == 0 + 0.5 * 51 - 41


def test_no_advantage_leaks_over_the_end_of_an_episode():
    def advantages(scripts):
        rollout = collector(8, scripts).collect(0, never)
        return targets(rollout, gamma=0.9, gae_lambda=0.9)[0]

    other_second_episode = [[SCRIPTS[0][0], ([-70.0, 90.0], "truncated")], SCRIPTS[1]]
    torch.testing.assert_close(advantages(SCRIPTS)[:3], advantages(other_second_episode)[:3])


def test_rewards_are_divided_by_the_std_of_the_discounted_return():
    gamma, rollout = 0.5, collector(8).collect(0, never)
    normalize = RewardNormalizer(2, gamma, Alone())
    scaled = normalize(rollout)
    # By hand, resets left out.
    first = [1, 2.5, 4.25, 5, 7.5, 1]
    second = [0, 4, 2, 5, 2.5, 0, 4]
    assert normalize.scale.variance == pytest.approx(np.var(first + second), rel=1e-3)
    torch.testing.assert_close(scaled, rollout.rewards / np.std(first + second), rtol=1e-3, atol=0)
    assert float(rollout.rewards.max()) == 5.0, "what is logged stays raw"


def test_reward_statistics_add_up_over_rollouts():
    collecting = collector(4)
    normalize = RewardNormalizer(2, 0.5, Alone())
    for index in range(2):
        normalize(collecting.collect(index, never))
    whole = RewardNormalizer(2, 0.5, Alone())
    whole(collector(8).collect(0, never))
    assert normalize.scale.variance == pytest.approx(whole.scale.variance)
    assert normalize.scale.mean == pytest.approx(whole.scale.mean)


def test_scaled_rewards_are_clipped():
    rollout = collector(8, [[([0.0] * 7 + [1e6], "terminated")]]).collect(0, never)
    normalize = RewardNormalizer(1, 0.5, Alone())
    normalize.scale.variance, normalize.scale.count = 1.0, 1e12
    assert float(normalize(rollout).max()) == 10.0


def test_actions_follow_the_policy():
    generator = np.random.default_rng(0)
    logits = torch.tensor([2.0, 0.0, -1.0]).repeat(200_000, 1)
    noise = -torch.from_numpy(generator.standard_exponential(logits.shape, dtype=np.float32)).log()
    shares = torch.bincount(sample(logits, noise), minlength=3) / len(logits)
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=0.005, rtol=0)


def test_an_environments_noise_does_not_depend_on_its_neighbours():
    together, alone_ = collector(5), collector(5)
    alone_.env_ids = [1]
    torch.testing.assert_close(together._noise(3)[:, 1], alone_._noise(3)[:, 0], rtol=0, atol=0)


def test_asked_to_stop_it_drops_the_rollout():
    assert collector(4).collect(0, lambda: True) is None


def test_a_time_limit_may_be_an_end_without_a_bootstrap():
    collecting = collector(8)
    collecting.time_limit = "terminal"
    rollout = collecting.collect(0, never)
    assert not rollout.truncated.any()
    assert rollout.terminated[:, 0].tolist() == [t in (2, 5) for t in range(8)]
    advantages, _ = targets(rollout, gamma=0.5, gae_lambda=0.0)
    assert float(advantages[5, 0]) == 5 - 110, "nothing is added for the last frame"
    same = collector(8).collect(0, never)
    assert rollout.episodes == same.episodes
    assert torch.equal(rollout.valid, same.valid)
