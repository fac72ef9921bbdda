"""The heads, the losses and their gradients in C: the same as the formulas in torch."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from helpers.pass_by_pass import PassByPass
from helpers.scripted import ScriptedEnv
from torch import nn

from rl_cluster_benchmark.algorithms.a2c import OBJECTIVE as A2C_OBJECTIVE
from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.experience.rollout import Collector, Rollout, sample
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.learning.batch import Batch
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.learning.losses import STATS
from rl_cluster_benchmark.learning.minibatch import Moments, TorchPasses
from rl_cluster_benchmark.nets.models import ActorCritic

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
    learner = ppo.on_policy.learner
    learner.zero_grad()
    learner.stats.zero_()
    rows = np.random.default_rng(2).permutation(SAMPLES)[:200]
    moments = Moments(180.0, 0.2, 1.7) if ppo.hyper.normalize_advantage else Moments(180.0, 0.0, 1.0)
    (PassByPass if in_c else TorchPasses)(learner, ppo.hyper, 64, batch, moments, objective).write(rows, 0)
    return learner.grad.clone(), learner.stats.clone()


@pytest.mark.parametrize("normalize_advantage", [True, False])
@pytest.mark.parametrize("algorithm", ["ppo", "ppo without clipped values", "a2c"])
def test_gradient_and_statistics_are_those_of_the_formulas_in_torch(algorithm, normalize_advantage):
    clip_values = algorithm == "ppo"
    ppo = make(clip_value_loss=clip_values, normalize_advantage=normalize_advantage, vf_coef=0.7, ent_coef=0.3)
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


def test_actions_are_chosen_as_in_torch():
    model = make().on_policy.model
    generator = torch.Generator().manual_seed(3)
    steps, envs = 4, 50
    features = torch.randn(steps, envs, FEATURES, generator=generator)
    noise = torch.randn(steps, envs, ACTIONS, generator=generator)
    noise[0, 0] = 0.0
    features[0, 0] = 0.0  # with equal scores, the first action
    with torch.no_grad():
        model.policy_head.bias.zero_()
    noise[1, 1, 2] = float("nan")
    act = heads.Acting(model.policy_head, model.value_head, noise)
    chosen = [[torch.from_numpy(array.copy()) for array in act(t, features[t])] for t in range(steps)]
    actions, log_probs, values = map(torch.stack, zip(*chosen, strict=True))
    with torch.no_grad():
        logits, expected_values = model.heads(features)
    expected = sample(logits, noise)
    assert torch.equal(actions, expected)
    assert (int(expected[0, 0]), int(expected[1, 1])) == (0, 2)
    expected_log_probs = logits.log_softmax(-1).gather(-1, expected.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs, expected_log_probs)
    torch.testing.assert_close(values, expected_values)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rollout_is_the_same_in_torch(transposed, monkeypatch):
    """Also where each environment's steps lie side by side, as in IMPALA's memory."""
    rollouts = []
    for in_c in (True, False):
        if not in_c:
            monkeypatch.setattr(heads, "suit", lambda policy, device: False)
        env = ScriptedEnv([[([1.0, -2.0, 3.0], "terminated")]] * 4)
        model = ActorCritic(nn.Linear(3, FEATURES), FEATURES, env.num_actions)
        nn.init.constant_(model.trunk.weight, 0.1)
        nn.init.normal_(model.policy_head.weight, std=0.2, generator=torch.Generator().manual_seed(4))
        nn.init.constant_(model.value_head.weight, 0.1)
        nn.init.zeros_(model.trunk.bias)
        collector = Collector(env, model, n_steps=20, env_ids=range(4), seed=0, device="cpu", clock=PhaseClock())
        if transposed:
            for field in fields(Rollout):
                tensor = getattr(collector.rollout, field.name)
                if field.name not in ("episodes", "last_observations", "last_values"):
                    memory = tensor.transpose(0, 1).contiguous()
                    setattr(collector.rollout, field.name, memory.transpose(0, 1))
        rollouts.append(collector.collect(0, lambda: False))
    in_c, in_torch = rollouts
    assert torch.equal(in_c.actions, in_torch.actions)
    assert len(in_c.actions.unique()) == 3
    for name in ("log_probs", "values", "last_values", "rewards"):
        torch.testing.assert_close(getattr(in_c, name), getattr(in_torch, name))
    for name in ("observations", "terminated", "truncated", "valid"):
        assert torch.equal(getattr(in_c, name), getattr(in_torch, name))


def test_too_many_actions_are_left_to_torch():
    assert heads.suit(nn.Linear(4, 256), torch.device("cpu"))
    assert not heads.suit(nn.Linear(4, 257), torch.device("cpu"))
