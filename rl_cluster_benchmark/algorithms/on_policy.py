"""What PPO and A2C share: the targets of a rollout, and gradient steps on parts of it.

Of several workers, each holds the rollout of its own environments. Sums over all of them go through `reduce`; nothing
else here depends on how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.config.schema import Config, TrainingConfig
from rl_cluster_benchmark.experience.returns import gae
from rl_cluster_benchmark.experience.rewards import RewardNormalizer
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.learning.bad_numbers import SKIPPED, report
from rl_cluster_benchmark.learning.learner import Learner
from rl_cluster_benchmark.learning.minibatch import (
    Batch,
    Gradient,
    InOneCall,
    Moments,
    Objective,
    PassByPass,
    PassSetting,
    Rows,
)
from rl_cluster_benchmark.learning.optimizers import optimizer_of
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic

SMALLEST_PIECE, SMALLEST_IN_TORCH = 2, 4  # samples; below that, the cost of a pass is not the samples'
STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")


class OnPolicyLearner:
    def __init__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self.config, self.hyper, self.model = config, config.training, model
        self.micro_batch, self.reduce, self.sharing = micro_batch, reduce, sharing
        self.rank = sharing.rank if sharing else 0
        self.env_ids = np.asarray(sharing.env_ids if sharing else env_ids)  # of the batch's columns
        self.owners = np.asarray(sharing.owners if sharing else [0] * len(env_ids))
        self.device = torch.device(config.hardware.device)
        self.losses_in_c = heads.suit(model.policy_head, self.device)
        self.normalize_rewards = RewardNormalizer(len(env_ids), self.hyper.gamma, reduce)
        self.learner = Learner(
            model,
            optimizer=optimizer_of(self.hyper),
            max_grad_norm=self.hyper.max_grad_norm,
            num_stats=len(STATS) + 1,  # the last one counts workers that were interrupted
            reduce=reduce,
            sharing=sharing,
        )

    def prepare(self, rollout: Rollout) -> Batch:
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
        """Rows of the batch, dealt to the workers that own them."""
        owners = self.owners[rows % len(self.owners)]
        return [rows[owners == worker] for worker in range(int(self.owners.max()) + 1)]

    def moments(self, batch: Batch, minibatches: Sequence[Rows]) -> list[Moments]:
        """Of every minibatch of the update, in one reduction."""
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
        """One step of the optimiser on a minibatch: (mean losses over all workers, was any of them interrupted?)."""
        learner, sharing = self.learner, self.sharing
        smallest = SMALLEST_PIECE if self.in_one_call else SMALLEST_IN_TORCH
        division = divide(rows, sharing.fraction if sharing else 0.0, learner.max_pieces, smallest)
        if sharing is not None:
            sharing.offer(division.num_pieces)
        kept, shared, bounds = division
        if learner.hidden is not None:
            learner.hidden.begin(sum(kept) + len(shared))
        gradient = self.gradient(batch, moments, objective)
        gradient.write(rows[self.rank][: kept[self.rank]], sum(kept[: self.rank]))
        learner.stats[-1] = float(interrupted)
        if sharing is not None and division.num_pieces:
            gradient.take(sharing, shared, bounds, sum(kept))
        *means, stops = learner.sum_over_workers()
        grad_norm = learner.step(learning_rate, means)
        return report(dict(zip(STATS, means, strict=True)) | {"grad_norm": grad_norm}, self.hyper.on_nan), stops > 0

    def gradient(self, batch: Batch, moments: Moments, objective: Objective) -> Gradient:
        """Of a minibatch, to be added up."""
        if not self.hyper.normalize_advantage:
            moments = moments._replace(advantage_mean=0.0, advantage_std=1.0)
        setting = PassSetting(self.learner, self.hyper, self.micro_batch, self.losses_in_c)
        return (InOneCall if self.in_one_call else PassByPass)(setting, batch, moments, objective)

    @property
    def in_one_call(self) -> bool:
        """From the observations to the losses and back in C?"""
        return self.losses_in_c and self.model.native_trunk is not None

    def learning_rate(self, progress: float) -> float:
        return learning_rate(self.hyper, progress)

    def explained_variance(self, batch: Batch) -> float:
        """1 - Var(returns - values) / Var(returns) over all workers; 0 when the returns do not vary."""
        own = self.own_rows(len(batch.valid))
        weight, returns = batch.valid[own].double(), batch.returns[own].double()
        errors = returns - batch.values[own]
        sums = [weight.sum(), *(weight @ x for x in (returns, returns.square(), errors, errors.square()))]
        count, total, squares, error, error_squares = self.reduce(torch.stack(sums).cpu()).tolist()
        return explained_variance(count, total, squares, error, error_squares)

    def own_rows(self, count: int) -> Tensor:
        return torch.from_numpy(self.by_worker(np.arange(count))[self.rank])

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.learner.state_dict(), "reward_normalizer": self.normalize_rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["optimizer"])
        self.normalize_rewards.load_state_dict(state["reward_normalizer"])


class Division(NamedTuple):
    """Of a minibatch, into what each worker keeps and pieces for whoever is free."""

    kept: list[int]  # how many of each worker's rows, the first ones
    shared: NDArray[np.int64]  # all others
    bounds: tuple[int, ...]  # of the pieces in these, the last one's end included

    @property
    def num_pieces(self) -> int:
        return len(self.bounds) - 1


def divide(rows: Rows, fraction: float, max_pieces: int, smallest: int) -> Division:
    kept = [len(own) - int(fraction * len(own)) for own in rows]
    rest = np.concatenate([own[count:] for own, count in zip(rows, kept, strict=True)])
    bounds = piece_bounds(len(rest), len(rows), max_pieces, smallest)
    return Division(kept, rest, bounds) if len(bounds) > 1 else Division([len(own) for own in rows], rest[:0], bounds)


@cache
def piece_bounds(count: int, workers: int, max_pieces: int, smallest: int) -> tuple[int, ...]:
    """Half of the samples in a piece for each worker, then half of the rest, and so on ("factoring", Hummel, 1992).

    Large pieces cost less; small ones at the end let all workers finish together, however fast each of them is.
    """
    if count < smallest * workers or max_pieces < workers:
        return (0,)
    while True:
        bounds = [0]
        while (left := count - bounds[-1]) > 0:
            size = max(smallest, -(-left // (2 * workers)))
            bounds += [min(count, bounds[-1] + size * (i + 1)) for i in range(min(workers, -(-left // size)))]
        if len(bounds) - 1 <= max_pieces:
            return tuple(bounds)
        smallest *= 2


def learning_rate(hyper: TrainingConfig, progress: float) -> float:
    """In use when `progress` (0 to 1) of the run is done."""
    return hyper.learning_rate * (1 - progress if hyper.anneal_lr else 1.0)


def nothing_learned(hyper: TrainingConfig, progress: float) -> dict[str, float]:
    """What an update of any algorithm returns, for one that was not made."""
    nothing = dict.fromkeys((*STATS, "grad_norm", "explained_variance"), math.nan)
    return nothing | {"learning_rate": learning_rate(hyper, progress), SKIPPED: 0.0}


def explained_variance(count: float, total: float, squares: float, error: float, error_squares: float) -> float:
    """From sums over value targets and over the errors of the values that predict them."""
    if count == 0:
        return 0.0
    variance = squares / count - (total / count) ** 2
    error_variance = error_squares / count - (error / count) ** 2
    return 1 - error_variance / variance if variance > 0 else 0.0
