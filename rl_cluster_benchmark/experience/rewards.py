"""Reward normalisation as in the Procgen paper: rewards divided by the running std of the discounted return."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_cluster_benchmark.experience.rollout import Rollout

CLIP = 10.0


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
