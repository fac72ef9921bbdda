"""The gradient of a minibatch of PPO or A2C, added up: a worker's own samples, then pieces that it shares with others.

A pass takes as many samples as fit into the cache; masked ones weigh nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.algorithms.passes import Pass, Slopes
from rl_cluster_benchmark.algorithms.reduction import Sharing
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.lesson import Lesson
from rl_cluster_benchmark.kernels.lesson import Losses as LossesInC

if TYPE_CHECKING:
    from rl_cluster_benchmark.algorithms.on_policy import OnPolicyLearner

EPSILON = 1e-8  # of the advantages' deviation


class Losses(NamedTuple):
    """Per sample, [B] each, in the order of STATS."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped: Tensor


@dataclass
class Batch:
    """Samples, flattened: row t * N + n is step t of environment n, of one worker or of all that share work."""

    observations: Tensor  # [T * N, *observation_shape]
    valid: Tensor  # [T * N] 1 for experience, 0 for resets
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


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


class Gradient(Protocol):
    def add(self, rows: NDArray[np.int64], place: int) -> None:
        """This worker's own, of these rows of the batch, which have their place in the minibatch."""
        ...

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        """Of the pieces of these that this worker gets."""
        ...


class PassByPass:
    """The network in torch, or on its way there; the losses in torch or in C."""

    def __init__(self, learning: OnPolicyLearner, batch: Batch, moments: Moments, objective: Objective) -> None:
        self.learning, self.learner, self.model = learning, learning.learner, learning.model
        self.batch, self.moments, self.objective = batch, moments, objective
        self.losses_in_c: LossesInC | None = None
        if learning.in_c:
            to = objective_in_c(learning, moments, objective)
            self.losses_in_c = LossesInC(self.model.policy_head, self.model.value_head, targets(batch), to)

    def add(self, rows: NDArray[np.int64], place: int) -> None:
        self.learner.zero_grad()
        for start in range(0, len(rows), self.learning.micro_batch):
            some = torch.from_numpy(rows[start : start + self.learning.micro_batch])
            if self.learner.hidden is not None:
                self.learner.hidden.place(place + start, len(some))
            self._pass(some)

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        for number in sharing.take():
            start, end = bounds[number : number + 2]
            self.learner.write_to(1 + number)
            self.add(rows[start:end], place + start)
        self.learner.write_to(0)

    @torch.no_grad()
    def _pass(self, rows: Tensor) -> None:
        batch, moments, device = self.batch, self.moments, self.learning.device
        if self.losses_in_c is not None:
            features, back = self.model.pass_through(batch.observations, rows)
            vector = self.learner.in_c.address(self.learner.written_to)
            back(self.losses_in_c(features, rows, vector))
            return
        observations, rows = batch.observations.index_select(0, rows).to(device), rows.to(device)
        now = Pass(self.model, observations, batch.actions[rows])
        advantages = (batch.advantages[rows] - moments.advantage_mean) / (moments.advantage_std + EPSILON)
        samples = Samples(batch.log_probs[rows], batch.values[rows], advantages, batch.returns[rows])
        losses, slopes = self.objective.losses(now, samples)
        weight = batch.valid[rows] / moments.num_samples
        hyper = self.learning.hyper
        now.backward(
            log_probs=weight * slopes.log_probs,
            values=hyper.vf_coef * weight * slopes.values,
            entropy=-hyper.ent_coef * weight,
        )
        self.learner.stats[:-1] += torch.stack(losses) @ weight


class InOneCall:
    """Everything in C."""

    def __init__(self, learning: OnPolicyLearner, batch: Batch, moments: Moments, objective: Objective) -> None:
        model, self.learner = learning.model, learning.learner
        assert model.native_trunk is not None
        self.lesson = Lesson(
            model.native_trunk, batch.observations, model.policy_head, model.value_head, targets(batch),
            objective_in_c(learning, moments, objective),
            most=learning.micro_batch, rows=self.learner.hidden.rows if self.learner.hidden else None,
        )  # fmt: skip

    def add(self, rows: NDArray[np.int64], place: int) -> None:
        self.lesson.add(rows, place, self.learner.in_c.address(0))

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        self.lesson.take(rows, np.array(bounds), place, self.learner.in_c.address(1), sharing.pipe)


def targets(batch: Batch) -> tuple[Tensor, ...]:
    """As the code in C takes them."""
    return batch.actions, batch.log_probs, batch.values, batch.advantages, batch.returns, batch.valid


def objective_in_c(learning: OnPolicyLearner, moments: Moments, objective: Objective) -> heads.Objective:
    return heads.Objective(
        moments.advantage_mean,
        moments.advantage_std + EPSILON,
        moments.num_samples,
        -1.0 if objective.clip_range is None else objective.clip_range,
        objective.clip_value_loss,
        learning.hyper.vf_coef,
        learning.hyper.ent_coef,
    )
