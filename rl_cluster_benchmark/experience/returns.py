"""Value targets and advantages from rewards and values: GAE and V-trace, as pure functions of [T, N] tensors."""

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
