"""Reward normalisation as in the Procgen paper: rewards over the running std of the discounted return."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.reduction import Reducer
from rl_cluster_benchmark.rollout import Rollout

CLIP = 10.0


class RewardNormalizer:
    """Scales a rollout's rewards. The statistics are those of all workers; resets are no experience and left out."""

    def __init__(self, num_envs: int, gamma: float, reduce: Reducer) -> None:
        self.gamma, self.reduce = gamma, reduce
        self.returns = torch.zeros(num_envs, dtype=torch.float64)  # discounted, of the open episodes
        self.mean, self.variance, self.count = 0.0, 1.0, 1e-4

    def __call__(self, rollout: Rollout) -> Tensor:
        self._update(self._discounted_returns(rollout)[rollout.valid])
        return (rollout.rewards / (self.variance + 1e-8) ** 0.5).clamp(-CLIP, CLIP)

    def _discounted_returns(self, rollout: Rollout) -> Tensor:
        returns = torch.empty(rollout.rewards.shape, dtype=torch.float64)  # [T, N]
        ended = rollout.terminated | rollout.truncated
        for t, rewards in enumerate(rollout.rewards):
            self.returns = self.returns * self.gamma + rewards
            returns[t] = self.returns
            self.returns = self.returns * ~ended[t]
        return returns

    def _update(self, returns: Tensor) -> None:
        """Merge the moments of new returns into the running ones (Chan's formula)."""
        moments = torch.stack([torch.tensor(float(len(returns))).double(), returns.sum(), returns.square().sum()])
        count, total, squares = self.reduce(moments).tolist()
        if count == 0:
            return
        mean = total / count
        variance = max(0.0, squares / count - mean * mean)
        delta, new_count = mean - self.mean, self.count + count
        spread = delta * delta * self.count * count / new_count
        self.variance = (self.variance * self.count + variance * count + spread) / new_count
        self.mean += delta * count / new_count
        self.count = new_count

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.variance, self.count = state["mean"], state["variance"], state["count"]
