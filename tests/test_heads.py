"""The heads, the losses and their gradients in C: the same as the formulas in torch."""

import numpy as np
import pytest
import torch
from torch import nn

from rl_cluster_benchmark.algorithms.a2c import OBJECTIVE as A2C_OBJECTIVE
from rl_cluster_benchmark.algorithms.on_policy import STATS, Batch, Moments
from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.algorithms.reduction import Alone
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.models import ActorCritic

INPUTS, FEATURES, ACTIONS, SAMPLES = 5, 37, 6, 300

pytestmark = pytest.mark.skipif(not heads.available(), reason="needs a C compiler")


def make(**training):
    torch.manual_seed(0)
    model = ActorCritic(nn.Linear(INPUTS, FEATURES), FEATURES, ACTIONS)
    nn.init.normal_(model.policy_head.weight, std=0.2)  # not a policy that is almost uniform
    config = Config.model_validate({"env": {"name": "CartPole-v1"}, "training": training})
    return PPO(config, model, env_ids=[0], micro_batch=64, reduce=Alone())


def experience(model):
    """With policies near and far, values near and far, and resets in between."""
    generator = torch.Generator().manual_seed(1)
    observations = torch.randn(SAMPLES, INPUTS, generator=generator)
    actions = torch.randint(ACTIONS, (SAMPLES,), generator=generator)
    with torch.no_grad():
        logits, values = model(observations)
    log_probs = logits.log_softmax(-1)[range(SAMPLES), actions]
    noise, change, advantages, returns = torch.randn(4, SAMPLES, generator=generator)
    valid = (torch.rand(SAMPLES, generator=generator) > 0.1).float()
    return Batch(observations, valid, actions, log_probs + 0.3 * noise, values + 0.3 * change, advantages, returns)


def gradient_and_stats(ppo, batch, objective, *, in_c):
    learner = ppo.on_policy
    learner.in_c = in_c
    learner.learner.zero_grad()
    learner.learner.stats.zero_()
    rows = np.random.default_rng(2).permutation(SAMPLES)[:200]
    learner.accumulate(batch, rows, 0, Moments(180.0, 0.2, 1.7), objective)
    return learner.learner.grad.clone(), learner.learner.stats.clone()


@pytest.mark.parametrize("normalize_advantage", [True, False])
@pytest.mark.parametrize("algorithm", ["ppo", "ppo without clipped values", "a2c"])
def test_gradient_and_statistics_are_those_of_the_formulas_in_torch(algorithm, normalize_advantage):
    clip_values = algorithm == "ppo"
    ppo = make(clip_value_loss=clip_values, normalize_advantage=normalize_advantage, vf_coef=0.7, ent_coef=0.3)
    assert ppo.on_policy.in_c
    batch = experience(ppo.on_policy.model)
    objective = A2C_OBJECTIVE if algorithm == "a2c" else ppo.objective
    expected, expected_stats = gradient_and_stats(ppo, batch, objective, in_c=False)
    found, stats = gradient_and_stats(ppo, batch, objective, in_c=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(stats, expected_stats, atol=1e-6, rtol=1e-5)
    clipped = float(stats[STATS.index("clipfrac")])
    assert clipped == 0 if algorithm == "a2c" else 0.2 < clipped < 0.8


@pytest.mark.parametrize(
    ("what", "value"), [("observations", float("nan")), ("advantages", float("inf")), ("log_probs", -200.0)]
)
def test_bad_numbers_show_in_the_same_statistics(what, value):
    """An infinite ratio times an advantage of zero is no number, whatever is clipped."""
    ppo = make(normalize_advantage=False)
    batch = experience(ppo.on_policy.model)
    if what == "log_probs":
        batch.advantages.zero_()
    getattr(batch, what)[:100] = value
    expected = torch.cat(gradient_and_stats(ppo, batch, ppo.objective, in_c=False))
    found = torch.cat(gradient_and_stats(ppo, batch, ppo.objective, in_c=True))
    assert not expected[-len(STATS) - 1 :].isfinite().all()
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_logits_may_be_large():
    """Of differences between numbers near ten million float32 keeps whole numbers: the order of sums matters."""
    ppo = make(normalize_advantage=False)
    with torch.no_grad():
        ppo.on_policy.model.policy_head.bias += 1e7
    batch = experience(ppo.on_policy.model)
    _, expected = gradient_and_stats(ppo, batch, ppo.objective, in_c=False)
    _, stats = gradient_and_stats(ppo, batch, ppo.objective, in_c=True)
    entropy = STATS.index("entropy")
    assert float(stats[entropy]) == pytest.approx(float(expected[entropy]), rel=0.02)
    assert float(stats[STATS.index("approx_kl")]) < 1


def test_too_many_actions_are_left_to_torch():
    assert heads.suit(nn.Linear(4, 256), torch.device("cpu"))
    assert not heads.suit(nn.Linear(4, 257), torch.device("cpu"))
