"""GAE and V-trace against their definitions, written as double sums."""

import itertools

import numpy as np
import pytest
import torch

from rl_cluster_benchmark.experience.returns import gae, vtrace


def gae_by_definition(rewards, values, last_values, terminated, truncated, gamma, gae_lambda):
    """advantage_t = sum over k of (gamma lambda)^k delta_{t+k}, up to and with the step that ends the episode."""
    steps, envs = rewards.shape
    following = torch.cat([values, last_values.unsqueeze(0)])
    advantages = torch.zeros_like(rewards)
    for t, n in itertools.product(range(steps), range(envs)):
        for k in range(steps - t):
            bootstrap = 0.0 if terminated[t + k, n] else float(following[t + k + 1, n])
            delta = rewards[t + k, n] + gamma * bootstrap - values[t + k, n]
            advantages[t, n] += (gamma * gae_lambda) ** k * delta
            if terminated[t + k, n] or truncated[t + k, n]:
                break
    return advantages


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_its_definition(seed, gamma, gae_lambda):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 12, 4, generator=generator).double()
    last_values = torch.randn(4, generator=generator).double()
    ends = torch.rand(2, 12, 4, generator=generator) < 0.15
    terminated, truncated = ends[0], ends[1] & ~ends[0]
    advantages, returns = gae(
        rewards=rewards,
        values=values,
        last_values=last_values,
        terminated=terminated,
        truncated=truncated,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    expected = gae_by_definition(rewards, values, last_values, terminated, truncated, gamma, gae_lambda)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


def test_lambda_one_gives_the_discounted_return():
    rewards = torch.tensor([[1.0], [2.0], [4.0]])
    nothing = torch.zeros(3, 1, dtype=torch.bool)
    ended = torch.tensor([[False], [False], [True]])
    _, returns = gae(
        rewards=rewards,
        values=torch.randn(3, 1),
        last_values=torch.randn(1),
        terminated=ended,
        truncated=nothing,
        gamma=0.5,
        gae_lambda=1.0,
    )
    torch.testing.assert_close(returns.squeeze(), torch.tensor([1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4]))


def vtrace_by_definition(unroll, gamma, vtrace_lambda, clip_rho, clip_c):
    """Equation 1 of Espeholt et al. (2018) as it stands: a sum over the steps that follow, each with its product.

    v_s = V(x_s) + sum_t gamma^(t-s) (prod_{i=s}^{t-1} lambda c_i) rho_t (r_t + gamma V(x_{t+1}) - V(x_t)), and the
    advantage r_s + gamma (lambda v_{s+1} + (1 - lambda) V(x_{s+1})) - V(x_s).
    """
    rhos, values = np.exp(unroll["log_rhos"].numpy()), unroll["values"].numpy()
    rewards, following = unroll["rewards"].numpy(), np.concatenate([values, unroll["last_values"][None].numpy()])
    terminated, truncated = unroll["terminated"].numpy(), unroll["truncated"].numpy()
    steps, envs = rewards.shape
    targets, advantages = following.copy(), np.zeros_like(rewards)
    for n in range(envs):
        for s in range(steps):
            for t in range(s, steps):
                product = np.prod([vtrace_lambda * min(clip_c, rhos[i, n]) for i in range(s, t)])
                bootstrap = 0.0 if terminated[t, n] else following[t + 1, n]
                delta = min(clip_rho, rhos[t, n]) * (rewards[t, n] + gamma * bootstrap - values[t, n])
                targets[s, n] += gamma ** (t - s) * product * delta
                if terminated[t, n] or truncated[t, n]:
                    break
        for s in range(steps):
            mixed = vtrace_lambda * targets[s + 1, n] + (1 - vtrace_lambda) * following[s + 1, n]
            after = following[s + 1, n] if truncated[s, n] else mixed
            after = 0.0 if terminated[s, n] else after
            advantages[s, n] = rewards[s, n] + gamma * after - values[s, n]
    return targets[:-1], advantages


def random_unroll(seed, steps=12, envs=4):
    generator = torch.Generator().manual_seed(seed)
    log_rhos, rewards, values = torch.randn(3, steps, envs, generator=generator).double()
    ends = torch.rand(2, steps, envs, generator=generator) < 0.15
    return {
        "log_rhos": log_rhos,
        "rewards": rewards,
        "values": values,
        "last_values": torch.randn(envs, generator=generator).double(),
        "terminated": ends[0],
        "truncated": ends[1] & ~ends[0],
    }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clips", [(1.0, 1.0), (2.0, 0.5), (0.7, 1.5), (1e9, 1e9)])
@pytest.mark.parametrize("vtrace_lambda", [1.0, 0.9, 0.0])
def test_vtrace_is_its_definition(seed, clips, vtrace_lambda):
    unroll = random_unroll(seed)
    clip_rho, clip_c = clips
    targets, advantages = vtrace(**unroll, gamma=0.97, vtrace_lambda=vtrace_lambda, clip_rho=clip_rho, clip_c=clip_c)
    expected_targets, expected_advantages = vtrace_by_definition(unroll, 0.97, vtrace_lambda, *clips)
    np.testing.assert_allclose(targets, expected_targets, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5, 0.0])
def test_on_policy_vtrace_with_lambda_is_gae(lam):
    """With lambda = 1 these are the n-step returns."""
    unroll = random_unroll(1) | {"log_rhos": torch.zeros(12, 4).double()}
    targets, advantages = vtrace(**unroll, gamma=0.9, vtrace_lambda=lam, clip_rho=1.0, clip_c=1.0)
    del unroll["log_rhos"]
    expected_advantages, expected_targets = gae(**unroll, gamma=0.9, gae_lambda=lam)
    torch.testing.assert_close(targets, expected_targets)
    torch.testing.assert_close(advantages, expected_advantages)


@pytest.mark.parametrize("cut", range(1, 12))
def test_vtrace_in_pieces_from_the_end_is_vtrace_of_the_whole(cut):
    unroll = random_unroll(cut, envs=9)
    clips = {"gamma": 0.97, "vtrace_lambda": 0.95, "clip_rho": 1.1, "clip_c": 0.9}
    whole = vtrace(**unroll, **clips)
    per_step = ("log_rhos", "rewards", "values", "terminated", "truncated")
    late = vtrace(**{name: unroll[name][cut:] for name in per_step}, last_values=unroll["last_values"], **clips)
    early = vtrace(
        **{name: unroll[name][:cut] for name in per_step},
        last_values=unroll["values"][cut],
        last_targets=late[0][0],
        **clips,
    )
    for pieces, expected in zip(zip(early, late, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(pieces), expected)
