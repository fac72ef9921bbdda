"""EnvPool with the reset that Stable-Baselines3 and CleanRL expect: in the step in which an episode ends.

EnvPool itself resets one step later; asked for it, it resets single environments at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from job import levels_of, make_pool


class Transition(NamedTuple):
    observations: NDArray  # [N, ...] to act on next
    rewards: NDArray  # [N]
    terminated: NDArray  # [N]
    truncated: NDArray  # [N]
    last_observations: dict[int, NDArray]  # the last frame of each episode that ended, by environment


class SameStepEnv:
    def __init__(self, num_envs: int, *, channel_first: bool, seed: int, num_threads: int | None = None) -> None:
        self.pool = make_pool(num_envs, channel_first=channel_first, seed=seed, num_threads=num_threads)
        self.num_envs = num_envs
        self.levels = levels_of(self.pool)

    def reset(self) -> NDArray:
        return self.pool.reset()[0]

    def step(self, actions: NDArray) -> Transition:
        observations, rewards, terminated, truncated, _ = self.pool.step(actions.astype(np.int32))
        ended = np.flatnonzero(terminated | truncated).astype(np.int32)
        last = {}
        if len(ended):
            last = {int(i): observations[i].copy() for i in ended}
            first, info = self.pool.reset(ended)
            observations[info["env_id"]] = first
        return Transition(observations, rewards, terminated, truncated, last)
