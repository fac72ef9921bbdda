"""The gradient of a minibatch of PPO or A2C, added up: a worker's own samples, then pieces that it shares with others.

A pass takes as many samples as fit into the cache; masked ones weigh nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.config.schema import TrainingConfig
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.minibatch_pass import HeadsPass, MinibatchInC
from rl_cluster_benchmark.learning.batch import Batch
from rl_cluster_benchmark.learning.learner import Learner
from rl_cluster_benchmark.learning.network_pass import Pass, Slopes
from rl_cluster_benchmark.learning.reduction import Sharing
from rl_cluster_benchmark.nets.models import ActorCritic

EPSILON = 1e-8  # of the advantages' deviation


class Losses(NamedTuple):
    """Per sample, [B] each, in the order of STATS."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped: Tensor


class Moments(NamedTuple):
    """Of a minibatch over all workers."""

    num_samples: float
    advantage_mean: float
    advantage_std: float


class Samples(NamedTuple):
    """A cache-sized piece of a minibatch: what a loss needs besides the network's output, [B] each."""

    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


Rows = list[NDArray[np.int64]]
"""Of a minibatch: the rows of each worker that can see the batch."""


@dataclass(frozen=True)
class Objective:
    """What a sample costs: in torch, and the same for the code in C."""

    losses: Callable[[Pass, Samples], tuple[Losses, Slopes]]
    clip_range: float | None  # of PPO; None for the plain policy gradient
    clip_value_loss: bool


class PassSetting(NamedTuple):
    """What is the same for all minibatches."""

    learner: Learner
    hyper: TrainingConfig
    micro_batch: int
    losses_in_c: bool

    @property
    def model(self) -> ActorCritic:
        return self.learner.model

    def heads_pass(self, batch: Batch, moments: Moments, objective: Objective) -> HeadsPass:
        """Heads and losses of a minibatch, in C."""
        targets = (batch.actions, batch.log_probs, batch.values, batch.advantages, batch.returns, batch.valid)
        in_c = heads.ObjectiveInC(
            moments.advantage_mean,
            moments.advantage_std + EPSILON,
            moments.num_samples,
            -1.0 if objective.clip_range is None else objective.clip_range,
            objective.clip_value_loss,
            self.hyper.vf_coef,
            self.hyper.ent_coef,
        )
        return HeadsPass(self.model.policy_head, self.model.value_head, targets, in_c)


class Gradient(Protocol):
    def write(self, rows: NDArray[np.int64], place: int) -> None:
        """This worker's own, of these rows of the batch, which have their place in the minibatch; and the statistics.

        Whatever was there before is gone.
        """
        ...

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        """Those of the pieces of these that this worker gets."""
        ...


class PassByPass:
    """The network in torch, or in C with losses in torch."""

    def __init__(self, setting: PassSetting, batch: Batch, moments: Moments, objective: Objective) -> None:
        self.setting, self.learner, self.model = setting, setting.learner, setting.model
        self.batch, self.moments, self.objective = batch, moments, objective
        self.behind = setting.heads_pass(batch, moments, objective) if setting.losses_in_c else None

    def write(self, rows: NDArray[np.int64], place: int) -> None:
        self.learner.zero_grad()
        for start in range(0, len(rows), self.setting.micro_batch):
            some = torch.from_numpy(rows[start : start + self.setting.micro_batch])
            if self.learner.hidden is not None:
                self.learner.hidden.place(place + start, len(some))
            self._pass(some)

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        for number in sharing.take():
            start, end = bounds[number : number + 2]
            self.learner.write_to(1 + number)
            self.write(rows[start:end], place + start)
        self.learner.write_to(0)

    @torch.no_grad()
    def _pass(self, rows: Tensor) -> None:
        batch, moments, hyper = self.batch, self.moments, self.setting.hyper
        if self.behind is not None:
            features, back = self.model.pass_through(batch.observations, rows)
            back(self.behind(features, rows, self.learner.vectors_in_c.address(self.learner.written_to)))
            return
        device = self.learner.flat.device
        observations, rows = batch.observations.index_select(0, rows).to(device), rows.to(device)
        now = Pass(self.model, observations, batch.actions[rows])
        advantages = (batch.advantages[rows] - moments.advantage_mean) / (moments.advantage_std + EPSILON)
        samples = Samples(batch.log_probs[rows], batch.values[rows], advantages, batch.returns[rows])
        losses, slopes = self.objective.losses(now, samples)
        weight = batch.valid[rows] / moments.num_samples
        now.backward(
            log_probs=weight * slopes.log_probs,
            values=hyper.vf_coef * weight * slopes.values,
            entropy=-hyper.ent_coef * weight,
        )
        self.learner.stats[:-1] += torch.stack(losses) @ weight


class InOneCall:
    """Everything in C."""

    def __init__(self, setting: PassSetting, batch: Batch, moments: Moments, objective: Objective) -> None:
        trunk, hidden, self.vectors = setting.model.native_trunk, setting.learner.hidden, setting.learner.vectors_in_c
        assert trunk is not None
        behind = setting.heads_pass(batch, moments, objective)
        rows = hidden.rows if hidden else None
        self.minibatch = MinibatchInC(trunk, batch.observations, behind, most=setting.micro_batch, rows=rows)

    def write(self, rows: NDArray[np.int64], place: int) -> None:
        self.minibatch.write(rows, place, self.vectors.address(0))

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        self.minibatch.take(rows, np.array(bounds), place, self.vectors.address(1), sharing.pipe)
