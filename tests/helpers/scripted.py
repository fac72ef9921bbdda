"""Environments that play what a test has written down."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rl_cluster_benchmark.env.environments import Step
from rl_cluster_benchmark.experience.returns import gae
from rl_cluster_benchmark.experience.rollout import Rollout


class ScriptedEnv:
    """Environments that play fixed episodes, one after the other, with EnvPool's reset on the next step.

    An episode is a list of rewards and how it ends: "terminated" or "truncated". An observation is
    [environment, episode, step]; the true last frame of an episode has step = its length.
    """

    num_actions = 3
    observation_shape = (3,)
    observation_dtype = np.dtype(np.float32)

    def __init__(self, scripts: list[list[tuple[list[float], str]]]) -> None:
        self.scripts = scripts
        self.num_envs = len(scripts)
        self.episode = [0] * self.num_envs
        self.time = [0] * self.num_envs
        self.ended = [False] * self.num_envs

    def reset(self) -> np.ndarray:
        return self._observations()

    def step(self, actions: np.ndarray) -> Step:
        rewards, terminated, truncated = (np.zeros(self.num_envs, dtype) for dtype in (np.float32, bool, bool))
        for i, script in enumerate(self.scripts):
            if self.ended[i]:  # the action is ignored; this is the reset
                self.episode[i], self.time[i], self.ended[i] = self.episode[i] + 1, 0, False
                continue
            episode_rewards, how = script[self.episode[i] % len(script)]
            rewards[i] = episode_rewards[self.time[i]]
            self.time[i] += 1
            if self.time[i] == len(episode_rewards):
                self.ended[i] = True
                terminated[i], truncated[i] = how == "terminated", how == "truncated"
        return Step(self._observations(), rewards, terminated, truncated)

    def _observations(self) -> np.ndarray:
        return np.array([[i, self.episode[i], self.time[i]] for i in range(self.num_envs)], dtype=np.float32)


def targets(rollout: Rollout, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of a rollout with raw rewards."""
    return gae(
        rewards=rollout.rewards,
        values=rollout.values,
        last_values=rollout.last_values,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
