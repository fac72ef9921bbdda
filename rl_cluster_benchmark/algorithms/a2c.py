"""Advantage actor-critic (the synchronous form of Mnih et al., 2016): one gradient step on each rollout.

Targets are n-step returns with `training.gae_lambda` = 1, generalised advantages below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rl_cluster_benchmark.algorithms.on_policy import OnPolicyLearner
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.losses import Losses, LossInC, Objective, Pass, Samples, Slopes
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


def a2c_losses(now: Pass, samples: Samples) -> tuple[Losses, Slopes]:
    """Return the losses of each sample, [B] each, and their slopes."""
    log_ratio = now.log_probs - samples.log_probs
    error = now.values - samples.returns
    losses = Losses(
        policy=-now.log_probs * samples.advantages,
        value=0.5 * error.square(),
        entropy=now.entropy,
        approx_kl=log_ratio.exp() - 1 - log_ratio,  # zero but for rounding: the policy has not moved yet
        clipped=torch.zeros_like(error),
    )
    return losses, Slopes(-samples.advantages, error)


OBJECTIVE = Objective(a2c_losses, LossInC())


class A2C:
    """A2C's learner: one gradient step on all samples of each rollout."""

    def __init__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self.on_policy = OnPolicyLearner(
            config, model, env_ids=env_ids, micro_batch=micro_batch, reduce=reduce, sharing=sharing
        )
        self.learner, self.normalize_rewards = self.on_policy.learner, self.on_policy.normalize_rewards
        self.state_dict, self.load_state_dict = self.on_policy.state_dict, self.on_policy.load_state_dict

    def update(
        self, rollout: Rollout, *, index: int, progress: float, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        learning_rate = self.on_policy.learning_rate(progress)
        batch = self.on_policy.prepare(rollout)
        rows = self.on_policy.by_worker(np.arange(len(batch.valid)))
        (moments,) = self.on_policy.moments(batch, [rows])
        step, _ = self.on_policy.step(batch, rows, moments, OBJECTIVE, learning_rate, interrupted=False)
        explained_variance = self.on_policy.explained_variance(batch)
        return step | {"explained_variance": explained_variance, "learning_rate": learning_rate}
