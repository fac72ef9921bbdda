"""Proximal policy optimisation with a clipped objective (Schulman et al., 2017), as in the Procgen paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from rl_cluster_benchmark.algorithms.on_policy import OnPolicyLearner
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.seeding import stream
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.batch import Rows
from rl_cluster_benchmark.learning.losses import Losses, LossInC, Objective, Pass, Samples, Slopes, mean_of
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


def ppo_losses(
    now: Pass, samples: Samples, *, clip_range: float, clip_value_loss: bool
) -> tuple[Losses, Slopes]:  # fmt: skip
    """Return the losses of each sample, [B] each, and their slopes, which are zero where the clipped loss is larger."""
    log_ratio = now.log_probs - samples.log_probs
    ratio = log_ratio.exp()
    policy_loss = -samples.advantages * ratio  # its slope along log_probs is itself
    clipped_loss = -samples.advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    error = now.values - samples.returns
    value_loss, value_slope = error.square(), error
    if clip_value_loss:
        change = now.values - samples.values
        clipped_values = samples.values + change.clamp(-clip_range, clip_range)
        clipped_value_loss = (clipped_values - samples.returns).square()
        # Within the clip range the two losses differ only by rounding.
        is_flat = (clipped_value_loss > value_loss) & (change.abs() > clip_range)
        value_loss, value_slope = torch.max(value_loss, clipped_value_loss), error.masked_fill(is_flat, 0.0)
    losses = Losses(
        policy=torch.max(policy_loss, clipped_loss),
        value=0.5 * value_loss,
        entropy=now.entropy,
        approx_kl=ratio - 1 - log_ratio,
        clipped=((ratio - 1).abs() > clip_range).float(),
    )
    return losses, Slopes(policy_loss.masked_fill(clipped_loss > policy_loss, 0.0), value_slope)


class PPO:
    """PPO's learner: several epochs over shuffled minibatches of each rollout."""

    def __init__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self.config, self.hyper = config, config.training
        self.on_policy = OnPolicyLearner(
            config, model, env_ids=env_ids, micro_batch=micro_batch, reduce=reduce, sharing=sharing
        )
        clip_range, clip_values = self.hyper.clip_range, self.hyper.clip_value_loss
        losses = partial(ppo_losses, clip_range=clip_range, clip_value_loss=clip_values)
        self.objective = Objective(losses, LossInC(clip_range, clip_values))
        self.learner, self.normalize_rewards = self.on_policy.learner, self.on_policy.normalize_rewards
        self.state_dict, self.load_state_dict = self.on_policy.state_dict, self.on_policy.load_state_dict

    def update(
        self, rollout: Rollout, *, index: int, progress: float, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        """Make update number `index` of the run, of which `progress` (0 to 1) is done; return the mean losses.

        When `interrupted` returns true, the update ends after the current minibatch.
        """
        learning_rate = self.on_policy.learning_rate(progress)
        batch = self.on_policy.prepare(rollout)
        epochs = [list(self.minibatches(index, epoch)) for epoch in range(self.hyper.n_epochs)]
        moments = iter(self.on_policy.moments(batch, [rows for epoch in epochs for rows in epoch]))
        steps, stop = [], False
        for epoch in epochs:
            for rows in epoch:
                step, stop = self.on_policy.step(
                    batch, rows, next(moments), self.objective, learning_rate, interrupted()
                )
                steps.append(step)
                if stop:
                    break
            if stop or (self.hyper.target_kl is not None and steps[-1]["approx_kl"] > self.hyper.target_kl):
                break
        explained_variance = self.on_policy.explained_variance(batch)
        return mean_of(steps) | {"explained_variance": explained_variance, "learning_rate": learning_rate}

    def minibatches(self, index: int, epoch: int) -> Iterator[Rows]:
        """Yield the rows of each minibatch that are in this batch, which may hold only this worker's samples.

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
