"""Losses: the pass that they are computed from, their slopes, and the metrics of an update that they become.

Every loss here depends on three numbers of a sample: the log-probability of the action taken, the value, and the
entropy. So a loss only has to give its slopes along these. The gradient from there to the features is written out:
autograd takes some sixty small operations for it, as long as the network in C takes for several images.
For PPO and A2C all of this also exists in C (kernels/minibatch_pass.py).

Losses and gradients are checked for NaN and infinite numbers after they were summed over the workers; experience is
checked before it is learned from, and the counts are summed. So all workers see the same numbers and decide the same.
An update that is left out changes nothing but the counts: neither the parameters nor the statistics of the optimiser
and of the rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.learning.learner import is_finite
from rl_cluster_benchmark.nets.models import ActorCritic

STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")  # the fields of Losses, as logs name them
OnNan = Literal["stop", "skip"]
SKIPPED, REWARDS, OBSERVATIONS = "skipped_updates", "bad_rewards", "bad_observations"
COUNTS = (SKIPPED, REWARDS, OBSERVATIONS)  # reported beside an update's losses; added up, not averaged


class Slopes(NamedTuple):
    """The slopes of the losses of each sample, [B] each; the slope along the entropy is constant and not among them."""

    log_probs: Tensor  # d policy loss / d log-probability of the action taken
    values: Tensor  # d value loss / d value


class Pass:
    """A forward pass over some observations, whose outputs are [B] each, and its backward pass."""

    log_probs: Tensor  # of the actions
    values: Tensor
    entropy: Tensor

    @torch.no_grad()
    def __init__(self, model: ActorCritic, observations: Tensor, actions: Tensor) -> None:
        self._model, self._actions = model, actions.unsqueeze(-1)
        self._features, self._back = model.pass_through(observations)
        logits, self.values = model.heads(self._features)
        self._log_policy = logits.log_softmax(-1)
        self._policy = self._log_policy.exp()
        self.log_probs = self._log_policy.gather(-1, self._actions).squeeze(-1)
        self.entropy = -(self._policy * self._log_policy).sum(-1)

    @torch.no_grad()
    def backward(self, log_probs: Tensor, values: Tensor, entropy: Tensor) -> None:
        """Add the gradient of a loss with these slopes, [B] each, to the parameters' gradients.

        With p the policy and H its entropy,
        d log p_a / d logit_j = [a = j] - p_j, and d H / d logit_j = -p_j (log p_j + H).
        """
        towards_entropy = (self._log_policy + self.entropy.unsqueeze(-1)).mul_(entropy.unsqueeze(-1))
        logits = towards_entropy.add_(log_probs.unsqueeze(-1)).mul_(self._policy).neg_()
        logits.scatter_add_(-1, self._actions, log_probs.unsqueeze(-1))
        policy_head, value_head = self._model.policy_head, self._model.value_head
        values = values.unsqueeze(-1)
        for head, gradient in ((policy_head, logits), (value_head, values)):
            _gradient(head.weight).addmm_(gradient.t(), self._features)
            _gradient(head.bias).add_(gradient.sum(0))
        self._back(torch.addmm(values @ value_head.weight, logits, policy_head.weight))


def _gradient(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class Losses(NamedTuple):
    """The losses and statistics of each sample, [B] each, in the order of STATS."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped: Tensor


class Samples(NamedTuple):
    """What a loss needs of the samples of a pass besides the network's output, [B] each."""

    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class LossInC:
    """The settings with which heads.h computes a loss: the policy gradient, clipped as in PPO or plain."""

    clip_range: float | None = None  # None for the plain policy gradient
    clip_value_loss: bool = False


@dataclass(frozen=True)
class Objective:
    """A loss as a function in torch and, if heads.h can compute it, as settings for that."""

    losses: Callable[[Pass, Samples], tuple[Losses, Slopes]]
    in_c: LossInC | None = None


def report(losses: dict[str, float], on_nan: OnNan) -> dict[str, float]:
    """Return the losses of an optimiser step with the count SKIPPED: 0, or 1 if they are not finite.

    Such a step was left out, and its losses become NaN. With `on_nan` = stop, raise TrainingFailedError instead.
    """
    if is_finite(*losses.values()):
        return losses | {SKIPPED: 0.0}
    if on_nan == "stop":
        raise TrainingFailedError(
            "The loss or its gradient became NaN or infinite; the last good checkpoint is kept. A smaller "
            "training.learning_rate, or hardware.precision=float32, may help; training.on_nan=skip leaves such updates "
            "out."
        )
    return dict.fromkeys(losses, math.nan) | {SKIPPED: 1.0}


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean losses over the steps that were taken, NaN if none was, and the sums of the counts."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _together(name, [step[name] for step in steps if name in step]) for name in names}


def _together(name: str, values: Sequence[float]) -> float:
    if name in COUNTS:
        return float(sum(values))
    taken = [value for value in values if math.isfinite(value)]
    return float(sum(taken) / len(taken)) if taken else math.nan


def left_out(counts: Sequence[float], on_nan: OnNan) -> dict[str, float]:
    """Return the counts of an update that is left out because of bad experience: `counts` of rewards and observations.

    With `on_nan` = stop, raise TrainingFailedError instead.
    """
    rewards, observations = counts
    if on_nan == "stop":
        raise TrainingFailedError(
            f"The environment gave {rewards:.0f} rewards and {observations:.0f} observations that are NaN or infinite; "
            "the last good checkpoint is kept. training.on_nan=skip leaves such experience out."
        )
    return {SKIPPED: 1.0, REWARDS: rewards, OBSERVATIONS: observations}
