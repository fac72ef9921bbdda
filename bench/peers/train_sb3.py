"""Stable-Baselines3: PPO or A2C on a VecEnv around EnvPool, rewards normalised by VecNormalize."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor

from job import NORMALISED, Job, Report, arguments, versions
from network import FEATURES, Trunk, save
from same_step_env import SameStepEnv


class EnvPoolVecEnv(VecEnv):
    def __init__(self, num_envs: int, seed: int) -> None:
        self.env = SameStepEnv(num_envs, channel_first=True, seed=seed)
        space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
        super().__init__(num_envs, space, gym.spaces.Discrete(self.env.pool.action_space.n))

    def reset(self) -> Any:
        return self.env.reset()

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        step = self.env.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i, frame in step.last_observations.items():
            infos[i] = {"terminal_observation": frame, "TimeLimit.truncated": bool(step.truncated[i])}
        return step.observations, step.rewards, step.terminated | step.truncated, infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> Sequence[bool]:
        return [False] * self.num_envs


class ImpalaExtractor(BaseFeaturesExtractor):
    def __init__(self, observation_space: gym.Space) -> None:
        super().__init__(observation_space, FEATURES)
        self.trunk = Trunk()

    def forward(self, observations: Tensor) -> Tensor:
        return self.trunk(observations)


class Watch(BaseCallback):
    """A line after every update; ends training when its time is over."""

    def __init__(self, report: Report, seconds: float | None) -> None:
        super().__init__()
        self._report, self._seconds = report, seconds

    def _on_training_start(self) -> None:
        self._began = time.monotonic()

    def _on_rollout_start(self) -> None:
        self._report.update(self.num_timesteps)

    def _on_step(self) -> bool:
        return self._seconds is None or time.monotonic() - self._began < self._seconds


def make_model(job: Job, env: VecEnv) -> BaseAlgorithm:
    shared: dict[str, Any] = {
        "learning_rate": job.learning_rate,
        "n_steps": job.n_steps,
        "gamma": job.gamma,
        "gae_lambda": job.gae_lambda,
        "ent_coef": job.entropy,
        "vf_coef": job.value,
        "max_grad_norm": job.max_grad_norm,
        "seed": job.seed,
        "device": "cpu",
    }
    network: dict[str, Any] = {"features_extractor_class": ImpalaExtractor, "net_arch": []}
    if job.algorithm == "a2c":
        return A2C("CnnPolicy", env, policy_kwargs=network, **shared)
    return PPO(
        "CnnPolicy",
        env,
        batch_size=job.batch_size,
        n_epochs=job.epochs,
        clip_range=job.clip,
        policy_kwargs=network | {"optimizer_kwargs": {"eps": 1e-5}},
        **shared,
    )


def main() -> None:
    args = arguments()
    job: Job = args.job
    venv = EnvPoolVecEnv(job.num_envs, job.seed)
    model = make_model(job, VecNormalize(venv, norm_obs=False, norm_reward=True, gamma=job.gamma))
    policy: Any = model.policy
    args.report.count(policy.features_extractor.trunk, policy)
    args.report.facts(
        num_envs=job.num_envs,
        levels=venv.env.levels,
        reward=NORMALISED,
        precision="float32",
        setting="one process, torch's threads",
        versions=versions("stable-baselines3"),
    )
    model.learn(10**9, callback=Watch(args.report, args.seconds))
    if args.save is not None:
        args.report.update(model.num_timesteps)
        save(args.save, policy.features_extractor.trunk, policy.action_net)


if __name__ == "__main__":
    main()
