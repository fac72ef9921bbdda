"""The interface between a loss and the code that computes its gradient: in torch for any loss, in C for some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rl_cluster_benchmark.learning.network_pass import Pass, Slopes

STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")  # the fields of Losses, as logs name them


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
    """The settings with which heads.c computes a loss: the policy gradient, clipped as in PPO or plain."""

    clip_range: float | None = None  # None for the plain policy gradient
    clip_value_loss: bool = False


@dataclass(frozen=True)
class Objective:
    """A loss as a function in torch and, if heads.c can compute it, as settings for that."""

    losses: Callable[[Pass, Samples], tuple[Losses, Slopes]]
    in_c: LossInC | None = None
