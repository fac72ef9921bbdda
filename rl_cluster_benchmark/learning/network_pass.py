"""A training pass: forward, then backward from the slopes of a loss.

Every loss here depends on three numbers of a sample: the log-probability of the action taken, the value, and the
entropy. So a loss only has to give its slopes along these. The gradient from there to the features is written out:
autograd takes some sixty small operations for it, as long as the network in C takes for several images.
For PPO and A2C all of this also exists in C (kernels/minibatch_pass.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_cluster_benchmark.nets.models import ActorCritic


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
