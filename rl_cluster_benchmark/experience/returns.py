"""What a rollout was worth: GAE and V-trace, as pure functions of [T, N] tensors, and the normalisation of rewards.

Rewards are normalised as in the Procgen paper: divided by the running standard deviation of the discounted return.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_cluster_benchmark.experience.rollout import Rollout

CLIP = 10.0  # of scaled rewards


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, value targets) of generalised advantage estimation, both [T, N].

    `values[t + 1]` after an episode's last step is the value of its true last frame: a truncated episode bootstraps
    from it, a terminated one from zero. The sum never crosses the end of an episode.
    """
    assert rewards.shape == values.shape == terminated.shape == truncated.shape
    assert last_values.shape == rewards.shape[1:]
    next_values = torch.cat([values[1:], last_values.unsqueeze(0)])  # [T, N]
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * (~(terminated | truncated)).to(rewards.dtype)
    advantages = from_the_end(deltas, decay, torch.zeros_like(last_values))
    return advantages, advantages + values


def vtrace(
    *,
    log_rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    vtrace_lambda: float,
    clip_rho: float,
    clip_c: float,
    last_targets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return V-trace's (value targets, advantages), both [T, N] (Espeholt et al., 2018).

    `log_rhos` is log pi(a) - log mu(a), of the policy that learns over the one that acted. Episodes end as in `gae`.
    The advantages carry no importance weight of their own step: the policy's loss brings it. `vtrace_lambda` discounts
    what later steps add to the targets and to the advantages alike, so that on policy both are those of
    `gae`; 1 is the paper's V-trace.
    `last_targets` are the targets of the step after the last: a long unroll may be worked through from its end in
    pieces, each given the first value and target of the one after it. Without them the last value is its own target.
    """
    assert log_rhos.shape == rewards.shape == values.shape == terminated.shape == truncated.shape
    assert last_values.shape == rewards.shape[1:]
    rhos = log_rhos.exp()
    ended = terminated | truncated
    next_values = torch.cat([values[1:], last_values.unsqueeze(0)])  # [T, N]
    deltas = rhos.clamp(max=clip_rho) * (rewards + gamma * next_values * ~terminated - values)
    decay = gamma * vtrace_lambda * rhos.clamp(max=clip_c) * ~ended
    last_errors = torch.zeros_like(last_values) if last_targets is None else last_targets - last_values
    errors = from_the_end(deltas, decay, last_errors)  # of the values: targets - values
    # What follows a step: the next value, moved by lambda towards its target; after a truncated episode the value of
    # its last frame, which is no step and has no target.
    following = next_values + vtrace_lambda * torch.cat([errors[1:], last_errors.unsqueeze(0)]) * ~ended
    return values + errors, rewards + gamma * following * ~terminated - values


def from_the_end(terms: Tensor, decay: Tensor, last: Tensor) -> Tensor:
    """Return sums, [T, N], with sums[t] = terms[t] + decay[t] * sums[t + 1] and `last`, [N], in place of sums[T].

    It is computed with numpy, whose small operations take a fraction of torch's time.
    """
    sums = torch.empty_like(terms)
    steps = zip(sums.numpy()[::-1], terms.numpy()[::-1], decay.numpy()[::-1], strict=True)
    running = last.numpy()
    for out, term, factor in steps:
        running = term + factor * running
        out[:] = running
    return sums


class DiscountedReturns:
    """The discounted returns of some environments' open episodes, kept from rollout to rollout."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.returns = torch.zeros(num_envs, dtype=torch.float64)

    def moments(self, rollout: Rollout) -> Tensor:
        """Return the moments of a rollout's discounted returns without resets, [N, 3]: count, sum, sum of squares."""
        returns = torch.empty(rollout.rewards.shape, dtype=torch.float64)  # [T, N]
        ended = rollout.terminated | rollout.truncated
        for t, rewards in enumerate(rollout.rewards):
            self.returns = self.returns * self.gamma + rewards
            returns[t] = self.returns
            self.returns = self.returns * ~ended[t]
        returns *= rollout.valid
        return torch.stack([rollout.valid.sum(0).double(), returns.sum(0), returns.square().sum(0)], dim=1)


class RewardScale:
    """Running statistics of discounted returns, and rewards scaled by them."""

    def __init__(self) -> None:
        self.mean, self.variance, self.count = 0.0, 1.0, 1e-4

    def add(self, count: float, total: float, squares: float) -> None:
        """Add new returns, given by their count, their sum and the sum of their squares."""
        if count > 0:
            mean = total / count
            self.merge(count, mean, max(0.0, squares / count - mean * mean))

    def merge(self, count: float, mean: float, variance: float) -> None:
        """Merge the mean and the variance of `count` other returns into these, by Chan's formula."""
        delta, new_count = mean - self.mean, self.count + count
        spread = delta * delta * self.count * count / new_count
        self.variance = (self.variance * self.count + variance * count + spread) / new_count
        self.mean += delta * count / new_count
        self.count = new_count

    @property
    def divisor(self) -> float:
        return (self.variance + 1e-8) ** 0.5

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.variance, self.count = state["mean"], state["variance"], state["count"]


def scaled(rewards: Tensor, divisor: float) -> Tensor:
    """Return the rewards divided by `divisor` and clipped to ±10."""
    return (rewards / divisor).clamp(-CLIP, CLIP)


class RewardNormalizer:
    """Scales a rollout's rewards by the statistics of all workers, those of this rollout included."""

    def __init__(self, num_envs: int, gamma: float, reduce: Callable[[Tensor], Tensor]) -> None:
        self.reduce = reduce
        self.returns, self.scale = DiscountedReturns(num_envs, gamma), RewardScale()

    def __call__(self, rollout: Rollout) -> Tensor:
        self.scale.add(*self.reduce(self.returns.moments(rollout).sum(0)).tolist())
        return scaled(rollout.rewards, self.scale.divisor)

    def state_dict(self) -> dict[str, float]:
        return self.scale.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale.load_state_dict(state)
