"""IMPALA's update against plain definitions."""

import pytest
import torch
from helpers.scripted import ScriptedEnv

from rl_cluster_benchmark.algorithms.a2c import A2C
from rl_cluster_benchmark.algorithms.impala import Impala, Unrolls
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.experience.returns import vtrace
from rl_cluster_benchmark.experience.rollout import Collector
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.nets.models import make_model

SCRIPTS = [[([1.0, -2.0, 3.0], "terminated"), ([5.0, 0.0], "truncated")], [([0.0, 4.0, 0.0], "truncated")]] * 4


def never():
    return False


def make(algorithm=Impala, micro_batch=64, impala=None, **training):
    config = Config.model_validate(
        {
            "algorithm": "impala",
            "env": {"name": "CartPole-v1", "num_envs": 8},
            "training": {"n_steps": 16, "batch_size": 128} | training,
            "impala": impala or {},
        }
    )
    torch.manual_seed(1)
    env = ScriptedEnv(SCRIPTS)
    model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, torch.float32)
    learning = algorithm(config, model, env_ids=range(8), micro_batch=micro_batch, reduce=Alone())
    collecting = Collector(env, model, n_steps=16, env_ids=range(8), seed=0, device="cpu", clock=PhaseClock())
    return learning, collecting.collect(0, never)


def whole(rollout, envs=range(8)):
    return Unrolls.of(rollout, list(envs), rollout.rewards)


def move(impala):
    """Away from the policy that acted."""
    generator = torch.Generator().manual_seed(3)
    impala.learner.flat += 0.3 * torch.randn(len(impala.learner.flat), generator=generator)


def test_the_gradient_is_that_of_the_definition():
    """Off policy, with resets, every clip and coefficient in use: against a loss written out, on all frames at once."""
    settings = {
        "vtrace_clip_rho_threshold": 1.4,
        "vtrace_clip_c_threshold": 0.9,
        "vtrace_clip_pg_rho_threshold": 1.2,
        "vtrace_lambda": 0.9,
        "entropy_coef": 0.02,
        "value_coef": 0.3,
        "max_grad_norm": 1e9,
    }
    impala, rollout = make(impala=settings)
    move(impala)
    logits, values = impala.model(rollout.observations.flatten(0, 1))
    logits, values = logits.view(16, 8, -1), values.view(16, 8)
    _, last_values = impala.model(rollout.last_observations)
    policy = torch.distributions.Categorical(logits=logits)
    log_probs = policy.log_prob(rollout.actions)
    targets, advantages = vtrace(
        log_rhos=(log_probs - rollout.log_probs).detach(),
        rewards=rollout.rewards,
        values=values.detach(),
        last_values=last_values.detach(),
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        gamma=0.999,
        vtrace_lambda=0.9,
        clip_rho=1.4,
        clip_c=0.9,
    )
    weights = (log_probs - rollout.log_probs).exp().detach().clamp(max=1.2)
    loss = -log_probs * weights * advantages + 0.3 * 0.5 * (values - targets).square() - 0.02 * policy.entropy()
    impala.learner.zero_grad()
    loss[rollout.valid].sum().backward()
    expected = impala.learner.grad.clone()
    losses = impala.step(whole(rollout), 0.0)
    torch.testing.assert_close(impala.learner.grad, expected, atol=1e-4, rtol=1e-4)
    assert losses["value_loss"] == pytest.approx(
        float(0.5 * (values - targets).square()[rollout.valid].mean().detach())
    )
    explained = 1 - (targets - values)[rollout.valid].var() / targets[rollout.valid].var()
    assert losses["explained_variance"] == pytest.approx(float(explained.detach()), abs=1e-4)
    assert losses["clipfrac"] > 0
    assert losses["approx_kl"] > 0


def test_on_policy_it_is_a2c_with_n_step_returns():
    """The same gradient, but for the sum that A2C divides by the number of samples."""
    impala, rollout = make(normalize_reward=False, impala={"max_grad_norm": 1e9})
    a2c, same = make(A2C, normalize_reward=False, gae_lambda=1.0, normalize_advantage=False, max_grad_norm=1e9)
    torch.testing.assert_close(rollout.observations, same.observations)
    losses = impala.update(rollout, index=0, progress=0.0, interrupted=never)
    reference = a2c.update(same, index=0, progress=0.0, interrupted=never)
    expected = a2c.on_policy.learner.grad * rollout.num_steps
    torch.testing.assert_close(impala.learner.grad, expected, atol=1e-4, rtol=1e-4)
    for name in ("policy_loss", "value_loss", "entropy", "explained_variance"):
        assert losses[name] == pytest.approx(reference[name], rel=1e-4), name


@pytest.mark.parametrize("micro_batch", [1, 5, 16, 40, 128])
def test_micro_batches_do_not_change_the_gradient(micro_batch):
    """Spans of one unroll, one whole, several: V-trace is carried from each part to the one before it."""
    gradients, losses = [], []
    for size in (1000, micro_batch):
        impala, rollout = make(micro_batch=size)
        move(impala)
        losses.append(impala.step(whole(rollout), 0.0))
        gradients.append(impala.learner.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)


def test_masked_slots_change_nothing():
    """But for their value: that of a truncated episode's last frame counts."""
    gradients = []
    for other in (False, True):
        impala, rollout = make()
        move(impala)
        if other:
            rollout.actions[~rollout.valid] = 2
            rollout.log_probs[~rollout.valid] = -5.0
            rollout.rewards[~rollout.valid] = 70.0
        impala.step(whole(rollout), 0.0)
        gradients.append(impala.learner.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=0)


def test_an_update_takes_a_step_on_every_few_environments():
    impala, rollout = make(batch_size=32)
    seen = []
    step = impala.step
    impala.step = lambda unrolls, rate: (seen.append(unrolls), step(unrolls, rate))[1]
    losses = impala.update(rollout, index=0, progress=0.5, interrupted=never)
    assert [len(unrolls) for unrolls in seen] == [2, 2, 2, 2]
    environments = sorted(int(unroll[0, 0]) for unrolls in seen for unroll in unrolls.observations)
    assert environments == list(range(8)), "each once"
    assert int(impala.learner.optimizer.steps) == 4
    assert losses["learning_rate"] == impala.config.training.learning_rate
    impala.update(rollout, index=1, progress=0.5, interrupted=lambda: True)
    assert int(impala.learner.optimizer.steps) == 5, "interrupted, it ends after the step in hand"


def test_nan_stops_before_it_reaches_the_parameters():
    impala, rollout = make(normalize_reward=False)
    rollout.rewards[0, 0] = float("nan")
    with pytest.raises(TrainingFailedError, match="NaN or infinite"):
        impala.update(rollout, index=7, progress=0.0, interrupted=never)
    assert bool(impala.learner.flat.isfinite().all())


def test_the_clipped_loss_is_that_of_its_definition():
    """Off policy, with normalised advantages and a mean over the samples: against autograd, on all frames at once."""
    settings = {"clip_range": 0.15, "normalize_advantage": True, "loss": "mean", "max_grad_norm": 1e9}
    impala, rollout = make(impala=settings)
    move(impala)
    impala.moments.add(100.0, 40.0, 90.0)  # of earlier steps: mean 0.4, mean square 0.9
    logits, values = impala.model(rollout.observations.flatten(0, 1))
    policy = torch.distributions.Categorical(logits=logits.view(16, 8, -1))
    values = values.view(16, 8)
    log_probs = policy.log_prob(rollout.actions)
    targets, advantages = vtrace(
        log_rhos=(log_probs - rollout.log_probs).detach(),
        rewards=rollout.rewards,
        values=values.detach(),
        last_values=impala.model(rollout.last_observations)[1].detach(),
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        gamma=0.999,
        vtrace_lambda=1.0,
        clip_rho=1.0,
        clip_c=1.0,
    )
    ratio, normalized = (log_probs - rollout.log_probs).exp(), (advantages - 0.4) / (0.9 - 0.4**2) ** 0.5
    policy_loss = torch.max(-normalized * ratio, -normalized * ratio.clamp(0.85, 1.15))
    loss = policy_loss + 0.5 * 0.5 * (values - targets).square() - 0.01 * policy.entropy()
    impala.learner.zero_grad()
    loss[rollout.valid].mean().backward()
    expected = impala.learner.grad.clone()
    losses = impala.step(whole(rollout), 0.0)
    torch.testing.assert_close(impala.learner.grad, expected, atol=1e-5, rtol=1e-4)
    assert losses["grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-4)
    clipped = ((ratio - 1).abs() > 0.15)[rollout.valid].float().mean()
    assert 0 < losses["clipfrac"] == pytest.approx(float(clipped), abs=1e-6)


@pytest.mark.parametrize("normalize_advantage", [False, True])
def test_with_a_ratio_of_one_the_clipped_loss_has_the_plain_gradient(normalize_advantage):
    gradients = []
    for clip_range in (None, 0.2):
        impala, rollout = make(impala={"clip_range": clip_range, "normalize_advantage": normalize_advantage})
        impala.step(whole(rollout), 0.0)
        gradients.append(impala.learner.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


class Beside(Alone):
    """Sums the vector of this learner with that of another one."""

    other = None

    def total(self, vector):
        return vector + self.other.learner._own if self.other else vector


@pytest.mark.parametrize("micro_batch", [5, 16, 1000])
def test_the_mean_is_over_the_valid_samples_of_all_learners(micro_batch):
    """Two learners with unequal shares take the step that one takes alone, and then have the same moments."""
    settings = {"loss": "mean", "max_grad_norm": 0.3, "normalize_advantage": True}
    alone, rollout = make(impala=settings)
    two = [make(impala=settings, micro_batch=micro_batch)[0] for _ in range(2)]
    for impala in (alone, *two):
        move(impala)
        impala.moments.add(100.0, 40.0, 90.0)
        impala.begin()
    alone.add(whole(rollout))
    two[0].add(whole(rollout, range(3)))
    two[1].add(whole(rollout, range(3, 8)))
    start = alone.learner.flat.clone()
    two[0].learner.reduce = Beside()
    two[0].learner.reduce.other = two[1]
    losses, expected = two[0].finish(0.1), alone.finish(0.1)
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(two[0].learner.flat, alone.learner.flat, atol=2e-4, rtol=1e-3)
    assert float((alone.learner.flat - start).abs().max()) > 0.01, "the step is large enough to be compared"
    assert two[0].moments.sums == pytest.approx(alone.moments.sums, rel=1e-4)


def test_advantages_are_normalised_by_what_recent_steps_had():
    """The first step by 0 and 1; from then on each step counts for 0.95 of the one after it."""
    impala, rollout = make(impala={"normalize_advantage": True})
    assert (impala.moments.mean, impala.moments.deviation) == (0.0, 1.0)
    seen = []
    for _ in range(3):
        before = list(impala.moments.sums)
        impala.step(whole(rollout), 1e-3)
        seen.append([new - 0.95 * old for new, old in zip(impala.moments.sums, before, strict=True)])
    counts = [count for count, _, _ in seen]
    assert counts == pytest.approx([rollout.num_steps] * 3)
    weights = [0.95**2, 0.95, 1.0]
    mean, square = (
        sum(weight * sums[i] for weight, sums in zip(weights, seen, strict=True))
        / sum(weight * count for weight, count in zip(weights, counts, strict=True))
        for i in (1, 2)
    )
    assert impala.moments.mean == pytest.approx(mean)
    assert impala.moments.deviation == pytest.approx((square - mean**2) ** 0.5)
    again, _ = make()
    again.load_state_dict(impala.state_dict())
    assert again.moments.sums == impala.moments.sums
    old = impala.state_dict()
    del old["advantages"]
    make()[0].load_state_dict(old)  # a checkpoint of before


def test_passes_are_steps_on_the_same_environments():
    impala, rollout = make(batch_size=32, impala={"passes": 3})
    seen = []
    step = impala.step
    impala.step = lambda unrolls, rate: (seen.append(unrolls), step(unrolls, rate))[1]
    impala.update(rollout, index=0, progress=0.0, interrupted=never)
    firsts = [int(unrolls.observations[0][0, 0]) for unrolls in seen]
    assert len(firsts) == 4 * 3
    assert all(len(set(firsts[start : start + 3])) == 1 for start in range(0, 12, 3))
    assert len(set(firsts)) == 4
