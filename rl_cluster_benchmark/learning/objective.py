"""What a loss is to the code that computes its gradient: in torch for any loss, in C for those that C code knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rl_cluster_benchmark.learning.network_pass import Pass, Slopes

STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")  # the fields of Losses, as logs name them


class Losses(NamedTuple):
    """What a loss says of each sample, [B] each, in the order of STATS."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped: Tensor


class Samples(NamedTuple):
    """What a loss needs to know of some samples of a minibatch besides the network's output, [B] each."""

    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class LossInC:
    """The same loss as heads.c computes it: the policy gradient, clipped as in PPO or plain."""

    clip_range: float | None = None  # None for the plain policy gradient
    clip_value_loss: bool = False


@dataclass(frozen=True)
class Objective:
    """What a sample costs. An objective without `in_c` is computed in torch, whatever is compiled."""

    losses: Callable[[Pass, Samples], tuple[Losses, Slopes]]
    in_c: LossInC | None = None
