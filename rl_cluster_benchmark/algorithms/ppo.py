"""Proximal policy optimisation with a clipped objective (Schulman et al., 2017), as in the Procgen paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.learner import Learner, Reduce
from rl_cluster_benchmark.algorithms.returns import gae
from rl_cluster_benchmark.algorithms.rewards import RewardNormalizer
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import TrainingFailedError
from rl_cluster_benchmark.models import ActorCritic
from rl_cluster_benchmark.rollout import Rollout
from rl_cluster_benchmark.seeding import stream

STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")


class Losses(NamedTuple):
    """Per sample, [B] each."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped: Tensor


def ppo_losses(
    *,
    logits: Tensor,  # [B, A] of the current policy
    values: Tensor,  # [B] of the current value function
    actions: Tensor,
    old_log_probs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    clip_range: float,
    clip_value_loss: bool,
) -> Losses:
    log_policy = logits.log_softmax(-1)
    log_ratio = log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - old_log_probs
    ratio = log_ratio.exp()
    policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))
    value_loss = (values - returns).square()
    if clip_value_loss:
        clipped_values = old_values + (values - old_values).clamp(-clip_range, clip_range)
        value_loss = torch.max(value_loss, (clipped_values - returns).square())
    return Losses(
        policy=policy_loss,
        value=0.5 * value_loss,
        entropy=-(log_policy.exp() * log_policy).sum(-1),
        approx_kl=(ratio - 1 - log_ratio).detach(),
        clipped=((ratio - 1).abs() > clip_range).float(),
    )


class PPO:
    """Turns rollouts into updates of the model. Of several workers, each has the rollout of its own environments."""

    def __init__(
        self,
        config: Config,
        model: ActorCritic,
        *,
        env_ids: Sequence[int],
        micro_batch: int,
        reduce: Reduce,
    ) -> None:
        self.config, self.hyper, self.model = config, config.training, model
        self.env_ids, self.micro_batch, self.reduce = env_ids, micro_batch, reduce
        self.device = torch.device(config.hardware.device)
        self.normalize_rewards = RewardNormalizer(len(env_ids), self.hyper.gamma, reduce)
        self.learner = Learner(
            model,
            eps=self.hyper.adam_eps,
            max_grad_norm=self.hyper.max_grad_norm,
            num_stats=len(STATS) + 1,  # the last one counts workers that were interrupted
            reduce=reduce,
        )

    def update(
        self, rollout: Rollout, *, index: int, progress: float, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        """Update number `index` of the run, `progress` of which (0 to 1) is done; returns the mean losses.

        Interrupted, it ends after the minibatch in hand: the parameters are whole at every such point.
        """
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
        batch = {
            "actions": rollout.actions,
            "old_log_probs": rollout.log_probs,
            "old_values": rollout.values,
            "advantages": advantages,
            "returns": returns,
        }
        batch = {name: tensor.flatten().to(self.device) for name, tensor in batch.items()}
        observations, valid = rollout.observations.flatten(0, 1), rollout.valid.flatten().float().to(self.device)
        minibatches = [list(self._minibatches(index, epoch)) for epoch in range(self.hyper.n_epochs)]
        moments = self._moments([mb for epoch in minibatches for mb in epoch], batch["advantages"], valid)

        learning_rate = self.hyper.learning_rate * (1 - progress if self.hyper.anneal_lr else 1.0)
        totals = torch.zeros(len(STATS), device=self.device)
        grad_norms: list[float] = []
        for epoch in minibatches:
            for minibatch in epoch:
                count, mean, std = moments[len(grad_norms)]
                self._accumulate(minibatch, observations, batch, valid / count, mean, std)
                self.learner.stats[-1] = float(interrupted())
                self.learner.sum_over_workers()
                stats = self.learner.stats.clone()
                grad_norms.append(self.learner.step(learning_rate))
                if not np.isfinite(grad_norms[-1]) or not bool(stats.isfinite().all()):
                    raise TrainingFailedError(
                        f"The loss or its gradient became NaN or infinite in update {index}; the last good checkpoint "
                        "is kept. A smaller training.learning_rate, or hardware.precision=float32, may help."
                    )
                totals += stats[:-1]
                if stats[-1] > 0:
                    break
            kl = float(stats[STATS.index("approx_kl")])
            if stats[-1] > 0 or (self.hyper.target_kl is not None and kl > self.hyper.target_kl):
                break
        means = dict(zip(STATS, (totals / len(grad_norms)).tolist(), strict=True))
        return means | {
            "explained_variance": self._explained_variance(batch["old_values"], batch["returns"], valid),
            "grad_norm": float(np.mean(grad_norms)),
            "learning_rate": learning_rate,
        }

    def _accumulate(
        self,
        minibatch: Tensor,
        observations: Tensor,
        batch: dict[str, Tensor],
        weights: Tensor,  # [T * N] 1 / samples in the global minibatch, 0 for a slot that is no experience
        advantage_mean: float,
        advantage_std: float,
    ) -> None:
        """Add up the minibatch's gradient and statistics, a cache-sized piece at a time."""
        self.learner.zero_grad()
        for rows in minibatch.split(self.micro_batch):
            logits, values = self.model(observations[rows].to(self.device))
            samples = {name: tensor[rows.to(self.device)] for name, tensor in batch.items()}
            if self.hyper.normalize_advantage:
                samples["advantages"] = (samples["advantages"] - advantage_mean) / (advantage_std + 1e-8)
            losses = ppo_losses(
                logits=logits,
                values=values,
                clip_range=self.hyper.clip_range,
                clip_value_loss=self.hyper.clip_value_loss,
                **samples,
            )
            per_sample = losses.policy + self.hyper.vf_coef * losses.value - self.hyper.ent_coef * losses.entropy
            weight = weights[rows.to(self.device)]
            (per_sample * weight).sum().backward()
            with torch.no_grad():
                self.learner.stats[:-1] += torch.stack(losses) @ weight

    def _minibatches(self, index: int, epoch: int) -> Iterator[Tensor]:
        """This worker's rows of each global minibatch.

        Every environment's steps are shuffled by themselves and dealt out evenly. So each minibatch draws equally from
        every environment, each worker has equal work, and the minibatches do not depend on the number of workers.
        """
        n_steps, num_envs = self.hyper.n_steps, len(self.env_ids)
        shuffled = np.stack(  # [T, N] time steps
            [stream(self.config.env.seed, "minibatch", index, epoch, i).permutation(n_steps) for i in self.env_ids],
            axis=1,
        )
        rows = torch.from_numpy((shuffled * num_envs + np.arange(num_envs)).ravel())
        places = (np.arange(n_steps)[:, None] * self.config.env.num_envs + np.asarray(self.env_ids)).ravel()
        starts = np.arange(self.config.batch_size, self.config.rollout_size, self.config.batch_size)
        yield from torch.tensor_split(rows, np.searchsorted(places, starts).tolist())

    def _moments(
        self, minibatches: list[Tensor], advantages: Tensor, valid: Tensor
    ) -> list[tuple[float, float, float]]:
        """(samples, mean and std of the advantages) of every global minibatch of the update, in one reduction."""
        sums = []
        for rows in minibatches:
            weight, values = valid[rows].double(), advantages[rows].double()
            sums.append(torch.stack([weight.sum(), (weight * values).sum(), (weight * values.square()).sum()]))
        count, total, squares = self.reduce(torch.stack(sums)).unbind(1)
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        return list(zip(count.tolist(), mean.tolist(), std.tolist(), strict=True))

    def _explained_variance(self, values: Tensor, returns: Tensor, valid: Tensor) -> float:
        """1 - Var(returns - values) / Var(returns) over all workers; 0 when the returns do not vary."""
        weight, returns = valid.double(), returns.double()
        errors = returns - values
        sums = [weight.sum(), *((weight * x).sum() for x in (returns, returns.square(), errors, errors.square()))]
        count, total, squares, error, error_squares = self.reduce(torch.stack(sums)).tolist()
        variance = squares / count - (total / count) ** 2
        error_variance = error_squares / count - (error / count) ** 2
        return 1 - error_variance / variance if variance > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.learner.state_dict(), "reward_normalizer": self.normalize_rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["optimizer"])
        self.normalize_rewards.load_state_dict(state["reward_normalizer"])
