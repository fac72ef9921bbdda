"""Proximal policy optimisation with a clipped objective (Schulman et al., 2017), as in the Procgen paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.bad_numbers import mean_of
from rl_cluster_benchmark.algorithms.on_policy import Losses, OnPolicyLearner, Rows, Samples
from rl_cluster_benchmark.algorithms.reduction import Reducer, Sharing
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.models import ActorCritic
from rl_cluster_benchmark.rollout import Rollout
from rl_cluster_benchmark.seeding import stream


def ppo_losses(
    logits: Tensor,  # [B, A] of the current policy
    values: Tensor,  # [B] of the current value function
    samples: Samples,
    *,
    clip_range: float,
    clip_value_loss: bool,
) -> Losses:
    log_policy = logits.log_softmax(-1)
    log_ratio = log_policy.gather(-1, samples.actions.unsqueeze(-1)).squeeze(-1) - samples.log_probs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + clip_range)
    policy_loss = torch.max(-samples.advantages * ratio, -samples.advantages * clipped_ratio)
    value_loss = (values - samples.returns).square()
    if clip_value_loss:
        clipped_values = samples.values + (values - samples.values).clamp(-clip_range, clip_range)
        value_loss = torch.max(value_loss, (clipped_values - samples.returns).square())
    return Losses(
        policy=policy_loss,
        value=0.5 * value_loss,
        entropy=-(log_policy.exp() * log_policy).sum(-1),
        approx_kl=(ratio - 1 - log_ratio).detach(),
        clipped=((ratio - 1).abs() > clip_range).float(),
    )


class PPO:
    """Several epochs over shuffled minibatches of each rollout."""

    def __init__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self.config, self.hyper = config, config.training
        self.on_policy = OnPolicyLearner(
            config, model, env_ids=env_ids, micro_batch=micro_batch, reduce=reduce, sharing=sharing
        )
        self.state_dict, self.load_state_dict = self.on_policy.state_dict, self.on_policy.load_state_dict

    def losses(self, logits: Tensor, values: Tensor, samples: Samples) -> Losses:
        return ppo_losses(
            logits, values, samples, clip_range=self.hyper.clip_range, clip_value_loss=self.hyper.clip_value_loss
        )

    def update(
        self, rollout: Rollout, *, index: int, progress: float, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        """Update number `index` of the run, `progress` of which (0 to 1) is done; returns the mean losses.

        Interrupted, it ends after the minibatch in hand: the parameters are whole at every such point.
        """
        learning_rate = self.on_policy.learning_rate(progress)
        batch = self.on_policy.prepare(rollout)
        epochs = [list(self.minibatches(index, epoch)) for epoch in range(self.hyper.n_epochs)]
        moments = iter(self.on_policy.moments(batch, [rows for epoch in epochs for rows in epoch]))
        steps, stop = [], False
        for epoch in epochs:
            for rows in epoch:
                step, stop = self.on_policy.step(batch, rows, next(moments), self.losses, learning_rate, interrupted())
                steps.append(step)
                if stop:
                    break
            if stop or (self.hyper.target_kl is not None and steps[-1]["approx_kl"] > self.hyper.target_kl):
                break
        explained_variance = self.on_policy.explained_variance(batch)
        return mean_of(steps) | {"explained_variance": explained_variance, "learning_rate": learning_rate}

    def minibatches(self, index: int, epoch: int) -> Iterator[Rows]:
        """The rows of each global minibatch, as far as the batch holds them.

        Every environment's steps are shuffled by themselves and dealt out evenly. So each minibatch draws equally from
        every environment, each worker has equal work, and the minibatches do not depend on the number of workers.
        """
        n_steps, env_ids = self.hyper.n_steps, self.on_policy.env_ids
        shuffled = np.stack(  # [T, N] time steps
            [stream(self.config.env.seed, "minibatch", index, epoch, int(i)).permutation(n_steps) for i in env_ids],
            axis=1,
        )
        rows = (shuffled * len(env_ids) + np.arange(len(env_ids))).ravel()
        places = (np.arange(n_steps)[:, None] * self.config.env.num_envs + env_ids).ravel()
        starts = np.arange(self.config.batch_size, self.config.rollout_size, self.config.batch_size)
        for minibatch in np.split(rows, np.searchsorted(places, starts)):
            yield self.on_policy.by_worker(minibatch)
