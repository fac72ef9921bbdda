"""GAE against its definition, written as a double sum."""

import itertools

import pytest
import torch

from rl_cluster_benchmark.algorithms.returns import gae


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
