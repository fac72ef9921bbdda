"""Rollouts: preallocated experience, and the collector that fills it by stepping environments with a policy.

Slot t of an environment holds the observation, the action taken on it, and what the step gave. After an episode's
last slot comes one slot with the episode's true last frame, whose action EnvPool ignores: it is no experience
(`valid` is False), but its value is the bootstrap of a truncated episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.core.seeding import stream
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.env.environments import VectorEnv
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.nets.models import ActorCritic

TimeLimit = Literal["bootstrap", "terminal"]


class Episode(NamedTuple):
    reward: float  # sum of the raw rewards
    length: int
    slot: int  # the slot of the rollout in which it ended
    env_id: int


@dataclass
class Rollout:
    observations: Tensor  # [T, N, *observation_shape] as the environment gave them
    actions: Tensor  # [T, N] int64
    log_probs: Tensor  # [T, N] of the actions, under the policy that took them
    values: Tensor  # [T, N] of the observations, when the actions were taken
    rewards: Tensor  # [T, N] raw
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    valid: Tensor  # [T, N] bool
    last_observations: Tensor  # [N, *observation_shape] after the last slot
    last_values: Tensor  # [N] of last_observations
    episodes: list[Episode] = field(default_factory=list)  # those that ended in this rollout

    @classmethod
    def allocate(cls, n_steps: int, env: VectorEnv) -> Rollout:
        shape = (n_steps, env.num_envs)
        observation_dtype = torch.from_numpy(np.empty(0, env.observation_dtype)).dtype
        return cls(
            observations=torch.zeros(*shape, *env.observation_shape, dtype=observation_dtype),
            actions=torch.zeros(shape, dtype=torch.int64),
            log_probs=torch.zeros(shape),
            values=torch.zeros(shape),
            rewards=torch.zeros(shape),
            terminated=torch.zeros(shape, dtype=torch.bool),
            truncated=torch.zeros(shape, dtype=torch.bool),
            valid=torch.zeros(shape, dtype=torch.bool),
            last_observations=torch.zeros(env.num_envs, *env.observation_shape, dtype=observation_dtype),
            last_values=torch.zeros(env.num_envs),
        )

    @property
    def num_steps(self) -> int:
        """Return the number of environment steps in the rollout, not counting resets."""
        return int(self.valid.sum())


def count_bad(rollout: Rollout | None) -> list[float]:
    """Return 1 if the rollout is to be left out, else 0, the number of bad rewards and that of bad observations.

    Observations are checked only if they are floats: bytes cannot be NaN or infinite.
    """
    if rollout is None:
        return [0.0, 0.0, 0.0]
    rewards = float((~rollout.rewards.isfinite()).sum())
    observations, last = 0.0, False
    if rollout.observations.is_floating_point():
        observations = float((~rollout.observations.isfinite()).flatten(2).any(-1).sum())
        last = not bool(rollout.last_observations.isfinite().all())  # counted with the next rollout, which starts there
    return [float(rewards > 0 or observations > 0 or last), rewards, observations]


class RolloutHelper(Protocol):
    """Lets workers compute features for each other: see execution/in_step/helping.py."""

    def features(self, t: int) -> Tensor:
        """Return the features of the observations in slot t of the rollout, [N, F]."""
        ...

    def finish(self, index: int) -> None:
        """Say that rollout number `index` is complete or given up, and help the other workers with theirs."""
        ...


class Collector:
    """Steps environments with the model's policy and keeps their open episodes between rollouts."""

    def __init__(
        self,
        env: VectorEnv,
        model: ActorCritic,
        *,
        n_steps: int,
        env_ids: Sequence[int],
        seed: int,
        device: str,
        clock: PhaseClock,
        time_limit: TimeLimit = "bootstrap",
        rollout: Rollout | None = None,
        helping: RolloutHelper | None = None,
    ) -> None:
        """`rollout` is what `collect` fills, if it is to lie in memory that others read."""
        self.env, self.model, self.time_limit = env, model, time_limit
        self.n_steps, self.env_ids, self.seed, self.device, self.clock = n_steps, env_ids, seed, device, clock
        self.rollout = rollout if rollout is not None else Rollout.allocate(n_steps, env)
        self.helping = helping
        self.observations = env.reset()
        self.just_ended = np.zeros(env.num_envs, dtype=np.bool_)
        self.episode_rewards = np.zeros(env.num_envs)
        self.episode_lengths = np.zeros(env.num_envs, dtype=np.int64)

    @torch.inference_mode()
    def collect(self, index: int, should_stop: Callable[[], bool]) -> Rollout | None:
        """Collect rollout number `index` of the run; return None, and drop what was collected, if asked to stop."""
        rollout = self.collect_unroll(index, should_stop, self.rollout)
        if rollout is not None:
            with self.clock.phase("inference"):
                _, last_values = self.model(rollout.last_observations.to(self.device))
                rollout.last_values.copy_(last_values)
        if self.helping is not None:
            self.helping.finish(index)
        return rollout

    @torch.inference_mode()
    def collect_unroll(self, index: int, should_stop: Callable[[], bool], rollout: Rollout) -> Rollout | None:
        """Fill the rollout without the values of the last observations, which IMPALA's learner computes itself."""
        rollout.episodes = []
        act = self._acting(self._noise(index))
        # Writing to the tensors through numpy takes a fraction of torch's time.
        seen, valid, actions = rollout.observations.numpy(), rollout.valid.numpy(), rollout.actions.numpy()
        log_probs, values = rollout.log_probs.numpy(), rollout.values.numpy()
        rewards, terminated, truncated = (
            tensor.numpy() for tensor in (rollout.rewards, rollout.terminated, rollout.truncated)
        )
        for t in range(self.n_steps):
            if should_stop():
                return None
            with self.clock.phase("inference"):
                seen[t] = self.observations
                actions[t], log_probs[t], values[t] = act(t, self._features(t))
            with self.clock.phase("env"):
                step = self.env.step(actions[t].astype(np.int32))
            rewards[t], terminated[t], truncated[t] = step.rewards, step.terminated, step.truncated
            if self.time_limit == "terminal":
                terminated[t] |= truncated[t]
                truncated[t] = False
            valid[t] = ~self.just_ended
            self.observations = step.observations
            self._count(rollout.episodes, t, step.rewards, step.terminated | step.truncated)
        rollout.last_observations.copy_(torch.from_numpy(self.observations))
        return rollout

    def _features(self, t: int) -> Tensor:
        """Return the features of the newest observations, which are those in slot t, [N, F]."""
        if self.helping is not None:
            return self.helping.features(t)
        return self.model.features(torch.from_numpy(self.observations).to(self.device))

    def _acting(self, noise: Tensor) -> Callable[[int, Tensor], heads.Choice]:
        """Return the function that chooses the actions of slot t from its features [N, F]."""
        model = self.model
        if heads.suit(model.policy_head, torch.device(self.device)):
            return heads.Acting(model.policy_head, model.value_head, noise)

        def act(t: int, features: Tensor) -> heads.Choice:
            logits, values = model.heads(features)
            actions = sample(logits, noise[t].to(self.device))
            log_probs = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            return tuple(tensor.cpu().numpy() for tensor in (actions, log_probs, values))

        return act

    def _noise(self, index: int) -> Tensor:
        """Return Gumbel noise [T, N, A], drawn per environment so that it does not depend on the number of workers."""
        shape = (self.n_steps, self.env.num_actions)
        draws = [
            stream(self.seed, "action", index, env_id).standard_exponential(shape, dtype=np.float32)
            for env_id in self.env_ids
        ]
        return torch.from_numpy(np.stack(draws, axis=1)).clamp_(min=1e-30).log_().neg_()

    def _count(self, episodes: list[Episode], t: int, rewards: NDArray[np.float32], ended: NDArray[np.bool_]) -> None:
        playing = ~self.just_ended
        self.episode_rewards += rewards * playing
        self.episode_lengths += playing
        for i in np.flatnonzero(ended).tolist():
            if np.isfinite(self.episode_rewards[i]):  # else its rewards are counted as bad (count_bad)
                reward, length = float(self.episode_rewards[i]), int(self.episode_lengths[i])
                episodes.append(Episode(reward, length, t, self.env_ids[i]))
            self.episode_rewards[i], self.episode_lengths[i] = 0.0, 0
        self.just_ended = ended


def sample(logits: Tensor, gumbel_noise: Tensor) -> Tensor:
    """Return actions [N] distributed as softmax(logits), by the Gumbel-max trick."""
    return (logits + gumbel_noise).argmax(-1)
