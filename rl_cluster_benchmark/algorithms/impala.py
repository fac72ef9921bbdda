"""IMPALA (Espeholt et al., 2018): an actor-critic that corrects with V-trace for experience of an older policy.

With `impala.clip_range` the policy's loss is PPO's clipped one on V-trace's advantages, which is known as APPO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.on_policy import explained_variance, learning_rate
from rl_cluster_benchmark.config.schema import Config, ImpalaConfig
from rl_cluster_benchmark.core.seeding import stream
from rl_cluster_benchmark.experience.returns import RewardNormalizer, vtrace
from rl_cluster_benchmark.experience.rollout import Rollout
from rl_cluster_benchmark.learning.learner import Learner, is_finite, optimizer_of
from rl_cluster_benchmark.learning.losses import STATS, Losses, Pass, Slopes, mean_of, report
from rl_cluster_benchmark.learning.minibatch import EPSILON
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


@dataclass
class Unrolls:
    """B unrolls, each T steps of one environment, which an older policy may have taken."""

    observations: Sequence[Tensor]  # B x [T, *observation_shape]: views, not copies
    last_observations: Sequence[Tensor]  # B x [*observation_shape] after the last step
    actions: Tensor  # [T, B]
    log_probs: Tensor  # [T, B] of the actions, under the policy that took them
    rewards: Tensor  # [T, B] normalised, if the config asks for it
    terminated: Tensor  # [T, B]
    truncated: Tensor  # [T, B]
    valid: Tensor  # [T, B] False for resets, which are no experience

    @classmethod
    def of(cls, rollout: Rollout, envs: Sequence[int], rewards: Tensor) -> Unrolls:
        return cls(
            [rollout.observations[:, env] for env in envs],
            [rollout.last_observations[env] for env in envs],
            rollout.actions[:, envs],
            rollout.log_probs[:, envs],
            rewards[:, envs],
            rollout.terminated[:, envs],
            rollout.truncated[:, envs],
            rollout.valid[:, envs],
        )

    def __len__(self) -> int:
        return len(self.observations)

    def part(self, start: int, end: int, columns: slice) -> Unrolls:
        """Return the steps from `start` to `end` of the unrolls in `columns`; observations stay views, not copies."""
        names = ("actions", "log_probs", "rewards", "terminated", "truncated", "valid")
        return Unrolls(
            [observations[start:end] for observations in self.observations[columns]],
            self.last_observations[columns],
            *(getattr(self, name)[start:end, columns] for name in names),
        )


class RunningMoments:
    """Running mean and standard deviation of the advantages over recent optimiser steps, weighted by their samples.

    All learners that take a step together add the same sums, so all have the same moments. Before the first step the
    mean is 0 and the deviation 1.
    """

    DECAY = 0.95  # for each step: about the last twenty steps count

    def __init__(self) -> None:
        self.sums = [0.0, 0.0, 0.0]  # samples, advantages, squares of advantages

    def add(self, *sums: float) -> None:
        self.sums = [self.DECAY * old + new for old, new in zip(self.sums, sums, strict=True)]

    @property
    def mean(self) -> float:
        count, total, _ = self.sums
        return total / count if count > 0 else 0.0

    @property
    def deviation(self) -> float:
        count, _, squares = self.sums
        return max(0.0, squares / count - self.mean**2) ** 0.5 if count > 0 else 1.0

    def state_dict(self) -> dict[str, list[float]]:
        return {"sums": list(self.sums)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.sums = list(state["sums"])


class Targets(NamedTuple):
    """V-trace's targets for some unrolls, [T, B] each."""

    values: Tensor
    advantages: Tensor  # neither normalised nor multiplied by importance weights


def impala_losses(
    now: Pass,
    unrolls: Unrolls,
    last_values: Tensor,  # [B]
    last_targets: Tensor,  # [B]
    *,
    gamma: float,
    hyper: ImpalaConfig,
    mean: float = 0.0,
    deviation: float = 1.0,
) -> tuple[Losses, Slopes, Targets]:
    """Return (losses per sample, their slopes, V-trace's targets), [T, B] each.

    The advantages are normalised with `mean` and `deviation`.
    """
    shape = unrolls.actions.t().shape

    def by_step(samples: Tensor) -> Tensor:
        return samples.view(shape).t().cpu()

    log_probs, values = by_step(now.log_probs), by_step(now.values)
    log_rhos = log_probs - unrolls.log_probs
    targets, advantages = vtrace(
        log_rhos=log_rhos,
        rewards=unrolls.rewards,
        values=values,
        last_values=last_values,
        last_targets=last_targets,
        terminated=unrolls.terminated,
        truncated=unrolls.truncated,
        gamma=gamma,
        vtrace_lambda=hyper.vtrace_lambda,
        clip_rho=hyper.vtrace_clip_rho_threshold,
        clip_c=hyper.vtrace_clip_c_threshold,
    )
    rhos, errors, clip = log_rhos.exp(), values - targets, hyper.clip_range
    normalized = (advantages - mean) / deviation
    if clip is None:
        slopes = -normalized * rhos.clamp(max=hyper.vtrace_clip_pg_rho_threshold)
        policy_loss, clipped = log_probs * slopes, rhos > hyper.vtrace_clip_rho_threshold
    else:
        loss, clipped_loss = -normalized * rhos, -normalized * rhos.clamp(1 - clip, 1 + clip)
        slopes = loss.masked_fill(clipped_loss > loss, 0.0)  # the slope of the ratio along log_probs is the ratio
        policy_loss, clipped = torch.max(loss, clipped_loss), (rhos - 1).abs() > clip
    losses = Losses(
        policy=policy_loss,
        value=0.5 * errors.square(),
        entropy=by_step(now.entropy),
        approx_kl=rhos - 1 - log_rhos,  # between the policy that acted and the one that learns
        clipped=clipped.float(),
    )
    return losses, Slopes(slopes, errors), Targets(targets, advantages)


def by_unroll(samples: Tensor) -> Tensor:
    """Flatten samples [T, B] to [B * T], one unroll after the other."""
    return samples.t().flatten()


class Impala:
    """IMPALA's learner: V-trace targets, and optimiser steps on batches of unrolls."""

    def __init__(
        self, config: Config, model: ActorCritic, *, env_ids: Sequence[int], micro_batch: int, reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        """Set up the learner. `sharing` is not used: a learner takes as many unrolls as it has time for."""
        self.config, self.hyper, self.model, self.micro_batch = config, config.impala, model, micro_batch
        self.device = torch.device(config.hardware.device)
        self.normalize_rewards = RewardNormalizer(len(env_ids), config.training.gamma, reduce.running_sum)
        self.learner = Learner(
            model,
            optimizer=optimizer_of(config.training),
            max_grad_norm=self.hyper.max_grad_norm,
            num_stats=len(STATS) + 7,  # the other 7 are the sums for explained_variance and the advantages' moments
            reduce=reduce,
        )
        self.moments = RunningMoments()

    def update(
        self, rollout: Rollout, *, index: int, progress: float, interrupted: Callable[[], bool]
    ) -> dict[str, float]:
        """Learn from a rollout, some of the environments per optimiser step; return the mean losses.

        V-trace corrects for the steps already taken. When `interrupted` returns true, the current step is the last.
        """
        rewards = self.normalize_rewards(rollout) if self.config.training.normalize_reward else rollout.rewards
        rate = learning_rate(self.config.training, progress)
        num_envs = rollout.actions.shape[1]
        shuffled = stream(self.config.env.seed, "minibatch", index).permutation(num_envs)
        parts = torch.tensor_split(torch.from_numpy(shuffled), max(1, round(num_envs / self.config.unrolls_per_step)))
        steps = []
        for envs in [envs for envs in parts for _ in range(self.hyper.passes)]:
            steps.append(self.step(Unrolls.of(rollout, envs.tolist(), rewards), rate))
            if interrupted():
                break
        return mean_of(steps)

    def step(self, unrolls: Unrolls, rate: float) -> dict[str, float]:
        """Take one optimiser step on these unrolls; return the mean losses."""
        self.begin()
        self.add(unrolls)
        return self.finish(rate)

    def begin(self) -> None:
        self.learner.zero_grad()

    def add(self, unrolls: Unrolls) -> None:
        """Add the gradient of some unrolls to that of the current step.

        The loss is a sum over samples, so any learner may add any of the unrolls.
        """
        last_values = self._values(unrolls.last_observations)
        for columns, pieces in self._pieces(unrolls):
            values = targets = last_values[columns]
            for start, end in pieces:  # from the end: V-trace looks ahead
                values, targets = self._accumulate(unrolls.part(start, end, columns), values, targets)

    def finish(self, rate: float) -> dict[str, float]:
        """Sum the gradient over the learners and step; return the mean losses over all of them."""
        *sums, count, total, squares, error, error_squares, advantages, advantage_squares = (
            self.learner.sum_over_workers()
        )
        samples = max(1.0, count) if self.hyper.loss == "mean" else 1.0
        grad_norm = self.learner.step(rate, sums, divisor=samples)
        if is_finite(*sums, grad_norm, advantages, advantage_squares):  # else the step is left out, and so are these
            self.moments.add(count, advantages, advantage_squares)
        losses = {name: value / max(1.0, count) for name, value in zip(STATS, sums, strict=True)}
        return report(losses | {"grad_norm": grad_norm}, self.config.training.on_nan) | {
            "explained_variance": explained_variance(count, total, squares, error, error_squares),
            "learning_rate": rate,
        }

    def _pieces(self, unrolls: Unrolls) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
        """Yield parts of at most micro_batch samples as (columns, [(start, end) of their steps, the last first]).

        A part is several whole unrolls if they fit, or else a span of steps of one unroll.
        """
        length = len(unrolls.actions)
        together, span = max(1, self.micro_batch // length), min(self.micro_batch, length)
        for first in range(0, len(unrolls), together):
            starts = range(0, length, span)
            yield (
                slice(first, min(first + together, len(unrolls))),
                [(start, min(start + span, length)) for start in reversed(starts)],
            )

    @torch.no_grad()
    def _values(self, observations: Sequence[Tensor]) -> Tensor:
        pieces = torch.stack(list(observations)).split(self.micro_batch)
        return torch.cat([self.model(piece.to(self.device))[1] for piece in pieces])

    def _accumulate(self, unrolls: Unrolls, last_values: Tensor, last_targets: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient and the statistics of a part; return the values and targets of its first step, [B] each."""
        observations = unrolls.observations
        flat = observations[0] if len(unrolls) == 1 else torch.cat(list(observations))  # [B * T, ...]
        now = Pass(self.model, flat.to(self.device), by_unroll(unrolls.actions).to(self.device))
        normalizing = self.hyper.normalize_advantage
        losses, slopes, (targets, advantages) = impala_losses(
            now,
            unrolls,
            last_values.cpu(),
            last_targets.cpu(),
            gamma=self.config.training.gamma,
            hyper=self.hyper,
            mean=self.moments.mean if normalizing else 0.0,
            deviation=self.moments.deviation + EPSILON if normalizing else 1.0,
        )
        weight = unrolls.valid.float()
        now.backward(
            log_probs=by_unroll(weight * slopes.log_probs).to(self.device),
            values=by_unroll(self.hyper.value_coef * weight * slopes.values).to(self.device),
            entropy=by_unroll(-self.hyper.entropy_coef * weight).to(self.device),
        )
        errors = slopes.values
        predicted = (targets, targets.square(), errors, errors.square())
        seen = (*losses, torch.ones_like(targets), *predicted, advantages, advantages.square())
        self.learner.stats.add_((torch.stack([x.flatten() for x in seen]) @ weight.flatten()).to(self.device))
        return now.values.view(len(unrolls), -1)[:, 0].cpu(), targets[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.learner.state_dict(),
            "reward_normalizer": self.normalize_rewards.state_dict(),
            "advantages": self.moments.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["optimizer"])
        self.normalize_rewards.load_state_dict(state["reward_normalizer"])
        if "advantages" in state:  # older checkpoints have none
            self.moments.load_state_dict(state["advantages"])
