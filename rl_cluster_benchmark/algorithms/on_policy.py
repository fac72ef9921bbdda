"""What PPO and A2C share: the targets of a rollout, and gradient steps on parts of it.

Each worker holds the rollout of its own environments. Sums over all workers go through `reduce`; nothing else here
depends on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.config.schema import Config, TrainingConfig
from rl_cluster_benchmark.experience.returns import RewardNormalizer, gae
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.batch import Batch, Rows
from rl_cluster_benchmark.learning.learner import Learner, optimizer_of
from rl_cluster_benchmark.learning.losses import SKIPPED, STATS, Objective, report
from rl_cluster_benchmark.learning.minibatch import MinibatchGradients, Moments
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


class OnPolicyLearner:
    """Makes a rollout's targets and takes optimiser steps on minibatches of it, with other workers if there are any."""

    def __init__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self.config, self.hyper, self.model = config, config.training, model
        self.reduce, self.sharing = reduce, sharing
        self.rank = sharing.rank if sharing else 0
        self.env_ids = np.asarray(sharing.env_ids if sharing else env_ids)  # the environment of each column of a batch
        self.owners = np.asarray(sharing.owners if sharing else [0] * len(env_ids))
        self.device = torch.device(config.hardware.device)
        self.normalize_rewards = RewardNormalizer(len(env_ids), self.hyper.gamma, reduce.running_sum)
        self.learner = Learner(
            model,
            optimizer=optimizer_of(self.hyper),
            max_grad_norm=self.hyper.max_grad_norm,
            num_stats=len(STATS) + 1,  # the last one is the number of workers that were interrupted
            reduce=reduce,
            sharing=sharing,
        )
        self.gradients = MinibatchGradients(self.learner, self.hyper, micro_batch=micro_batch, sharing=sharing)

    def prepare(self, rollout: Rollout) -> Batch:
        """Return the batch of a rollout with its advantages and returns; with shared work, that of all workers."""
        rewards = self.normalize_rewards(rollout) if self.hyper.normalize_reward else rollout.rewards
        advantages, returns = gae(
            rewards=rewards,
            values=rollout.values,
            last_values=rollout.last_values,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            gamma=self.hyper.gamma,
            gae_lambda=self.hyper.gae_lambda,
        )
        if self.sharing is not None:
            return self.sharing.batch(rollout.valid.float(), advantages, returns)
        tensors = (rollout.valid.float(), rollout.actions, rollout.log_probs, rollout.values, advantages, returns)
        return Batch(rollout.observations.flatten(0, 1), *(tensor.flatten().to(self.device) for tensor in tensors))

    def by_worker(self, rows: NDArray[np.int64]) -> Rows:
        """Split row numbers of the batch by the worker that owns their environment."""
        owners = self.owners[rows % len(self.owners)]
        return [rows[owners == worker] for worker in range(int(self.owners.max()) + 1)]

    def moments(self, batch: Batch, minibatches: Sequence[Rows]) -> list[Moments]:
        """Return the moments of the advantages of all minibatches of an update, with a single sum over the workers."""
        sums = []
        for rows in (torch.from_numpy(minibatch[self.rank]) for minibatch in minibatches):
            weight, advantages = batch.valid[rows].double(), batch.advantages[rows].double()
            sums.append(torch.stack([weight.sum(), weight @ advantages, weight @ advantages.square()]))
        count, total, squares = self.reduce(torch.stack(sums).cpu()).unbind(1)
        count = count.clamp(min=1)  # a minibatch of resets alone weighs nothing
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        return [Moments(*values) for values in zip(count.tolist(), mean.tolist(), std.tolist(), strict=True)]

    def step(
        self,
        batch: Batch,
        rows: Rows,
        moments: Moments,
        objective: Objective,
        learning_rate: float,
        interrupted: bool,
    ) -> tuple[dict[str, float], bool]:
        """Take one optimiser step on a minibatch; return the mean losses, and whether any worker was interrupted."""
        *means, stops = self.gradients.sum(batch, rows, moments, objective, float(interrupted))
        grad_norm = self.learner.step(learning_rate, means)
        return report(dict(zip(STATS, means, strict=True)) | {"grad_norm": grad_norm}, self.hyper.on_nan), stops > 0

    def learning_rate(self, progress: float) -> float:
        return learning_rate(self.hyper, progress)

    def explained_variance(self, batch: Batch) -> float:
        """Return 1 - Var(returns - values) / Var(returns) over all workers; 0 when the returns do not vary."""
        own = self.own_rows(len(batch.valid))
        weight, returns = batch.valid[own].double(), batch.returns[own].double()
        errors = returns - batch.values[own]
        sums = [weight.sum(), *(weight @ x for x in (returns, returns.square(), errors, errors.square()))]
        count, total, squares, error, error_squares = self.reduce(torch.stack(sums).cpu()).tolist()
        return explained_variance(count, total, squares, error, error_squares)

    def own_rows(self, count: int) -> Tensor:
        """Return which of a batch's `count` rows are this worker's own samples."""
        return torch.from_numpy(self.by_worker(np.arange(count))[self.rank])

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.learner.state_dict(), "reward_normalizer": self.normalize_rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["optimizer"])
        self.normalize_rewards.load_state_dict(state["reward_normalizer"])


def learning_rate(hyper: TrainingConfig, progress: float) -> float:
    """Return the learning rate for when `progress` (0 to 1) of the run is done."""
    return hyper.learning_rate * (1 - progress if hyper.anneal_lr else 1.0)


def nothing_learned(hyper: TrainingConfig, progress: float) -> dict[str, float]:
    """Return the metrics of an update that was not made, with the names that every algorithm's update returns."""
    nothing = dict.fromkeys((*STATS, "grad_norm", "explained_variance"), math.nan)
    return nothing | {"learning_rate": learning_rate(hyper, progress), SKIPPED: 0.0}


def explained_variance(count: float, total: float, squares: float, error: float, error_squares: float) -> float:
    """Return the explained variance from sums over value targets and over the errors of the predicted values.

    `count` is the number of samples; `total` and `squares` are sums over targets, the other two over errors.
    """
    if count == 0:
        return 0.0
    variance = squares / count - (total / count) ** 2
    error_variance = error_squares / count - (error / count) ** 2
    return 1 - error_variance / variance if variance > 0 else 0.0
