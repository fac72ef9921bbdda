"""The gradient of a minibatch of PPO or A2C: a worker's own samples, then pieces that it shares with other workers.

Losses that the C code knows are computed in C if the network is, all others in torch. A pass takes as many samples as
fit into the cache; masked samples weigh nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.config.schema import TrainingConfig
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.minibatch_pass import MinibatchInC
from rl_cluster_benchmark.kernels.native_network import NativeTrunk
from rl_cluster_benchmark.learning.batch import Batch, Division, Rows, divide
from rl_cluster_benchmark.learning.learner import Learner
from rl_cluster_benchmark.learning.losses import LossInC, Objective, Pass, Samples
from rl_cluster_benchmark.learning.reduction import Sharing

EPSILON = 1e-8  # added to the advantages' standard deviation
SMALLEST_PIECE_IN_C, SMALLEST_PIECE_IN_TORCH = 2, 4  # samples; a smaller piece takes hardly less time


class Moments(NamedTuple):
    """The number of samples of a minibatch over all workers, and mean and standard deviation of their advantages."""

    num_samples: float
    advantage_mean: float
    advantage_std: float


class MinibatchGradients:
    """Computes the gradients of minibatches, together with other workers if there are any."""

    def __init__(
        self, learner: Learner, hyper: TrainingConfig, *, micro_batch: int, sharing: Sharing | None = None
    ) -> None:
        self.learner, self.hyper, self.micro_batch, self.sharing = learner, hyper, micro_batch, sharing
        self.rank = sharing.rank if sharing else 0

    def sum(self, batch: Batch, rows: Rows, moments: Moments, objective: Objective, flag: float) -> list[float]:
        """Leave the gradient of a minibatch, summed over all workers, in the learner.

        Returns the mean losses, in the order of STATS, and the sum over the workers of the flag behind them.
        """
        learner, sharing = self.learner, self.sharing
        passes = self.passes(batch, moments, objective)
        division = Division([len(rows[0])], rows[0][:0], (0,))  # a worker alone keeps everything
        if sharing is not None:
            division = divide(rows, sharing.fraction, learner.max_pieces, passes.SMALLEST_PIECE)
            sharing.offer(division.num_pieces)
        kept, shared, bounds = division
        if learner.hidden is not None:
            learner.hidden.begin(sum(kept) + len(shared))
        passes.write(rows[self.rank][: kept[self.rank]], sum(kept[: self.rank]))
        learner.stats[-1] = flag
        if sharing is not None and division.num_pieces:
            passes.take(sharing, shared, bounds, sum(kept))
        return learner.sum_over_workers()

    def passes(self, batch: Batch, moments: Moments, objective: Objective) -> MinibatchPasses:
        """Return what computes this minibatch's gradient: C code where it knows the loss and the network, or torch."""
        if not self.hyper.normalize_advantage:
            moments = moments._replace(advantage_mean=0.0, advantage_std=1.0)
        model, learner = self.learner.model, self.learner
        in_c, trunk = objective.in_c, model.native_trunk
        if in_c is None or trunk is None or not heads.suit(model.policy_head, learner.flat.device):
            return TorchPasses(learner, self.hyper, self.micro_batch, batch, moments, objective)
        return PassesInC(learner, self.hyper, batch, moments, in_c, trunk)


class MinibatchPasses(Protocol):
    """Computes the gradient of a minibatch pass by pass, in C or in torch."""

    SMALLEST_PIECE: int

    def write(self, rows: NDArray[np.int64], place: int) -> None:
        """Write the gradient of these rows of the batch, and their statistics, over whatever was there before.

        `place` is the number of the first of them within the minibatch.
        """
        ...

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        """Take pieces of the shared rows until none is left, and write each piece's gradient to its own vector.

        Piece i is `rows[bounds[i]:bounds[i + 1]]`; `place` is the number of the first row within the minibatch.
        """
        ...


class TorchPasses:
    """Computes a minibatch's gradient with losses in torch, on a network in torch or in C."""

    SMALLEST_PIECE = SMALLEST_PIECE_IN_TORCH

    def __init__(
        self, learner: Learner, hyper: TrainingConfig, micro_batch: int, batch: Batch, moments: Moments,
        objective: Objective,
    ) -> None:  # fmt: skip
        self.learner, self.hyper, self.micro_batch = learner, hyper, micro_batch
        self.batch, self.moments, self.objective = batch, moments, objective

    def write(self, rows: NDArray[np.int64], place: int) -> None:
        self.learner.zero_grad()
        for start in range(0, len(rows), self.micro_batch):
            some = torch.from_numpy(rows[start : start + self.micro_batch])
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
        batch, moments, hyper = self.batch, self.moments, self.hyper
        device = self.learner.flat.device
        observations, rows = batch.observations.index_select(0, rows).to(device), rows.to(device)
        now = Pass(self.learner.model, observations, batch.actions[rows])
        advantages = (batch.advantages[rows] - moments.advantage_mean) / (moments.advantage_std + EPSILON)
        samples = Samples(batch.log_probs[rows], batch.values[rows], advantages, batch.returns[rows])
        losses, slopes = self.objective.losses(now, samples)
        weight = batch.valid[rows] / moments.num_samples
        now.backward(
            log_probs=weight * slopes.log_probs,
            values=hyper.vf_coef * weight * slopes.values,
            entropy=-hyper.ent_coef * weight,
        )
        self.learner.stats[: len(losses)] += torch.stack(losses) @ weight


class PassesInC:
    """Computes a minibatch's gradient in C, from the observations to the losses and back."""

    SMALLEST_PIECE = SMALLEST_PIECE_IN_C

    def __init__(
        self, learner: Learner, hyper: TrainingConfig, batch: Batch, moments: Moments, loss: LossInC, trunk: NativeTrunk
    ) -> None:
        self.vectors = learner.vectors_in_c
        objective = heads.ObjectiveInC(
            moments.advantage_mean,
            moments.advantage_std + EPSILON,
            moments.num_samples,
            -1.0 if loss.clip_range is None else loss.clip_range,
            loss.clip_value_loss,
            hyper.vf_coef,
            hyper.ent_coef,
        )
        targets = (batch.actions, batch.log_probs, batch.values, batch.advantages, batch.returns, batch.valid)
        in_c = heads.Heads.of(learner.model.policy_head, learner.model.value_head)
        rows = learner.hidden.rows if learner.hidden else None
        self.minibatch = MinibatchInC(trunk, batch.observations, in_c, objective, targets, rows=rows)

    def write(self, rows: NDArray[np.int64], place: int) -> None:
        self.minibatch.write(rows, place, self.vectors.address(0))

    def take(self, sharing: Sharing, rows: NDArray[np.int64], bounds: Sequence[int], place: int) -> None:
        self.minibatch.take(rows, np.array(bounds), place, self.vectors.address(1), sharing.pipe)
