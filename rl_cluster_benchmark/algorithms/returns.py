"""Targets from rewards and values, as pure functions of [T, N] tensors."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Generalised advantage estimation: (advantages, value targets), both [T, N].

    `values[t + 1]` after an episode's last step is the value of its true last frame: a truncated episode bootstraps
    from it, a terminated one from zero. The sum never crosses the end of an episode.
    """
    assert rewards.shape == values.shape == terminated.shape == truncated.shape
    assert last_values.shape == rewards.shape[1:]
    next_values = torch.cat([values[1:], last_values.unsqueeze(0)])  # [T, N]
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * (~(terminated | truncated)).to(rewards.dtype)
    advantages = torch.empty_like(rewards)
    running = torch.zeros_like(last_values)
    for t in range(len(rewards) - 1, -1, -1):
        running = deltas[t] + decay[t] * running
        advantages[t] = running
    return advantages, advantages + values
