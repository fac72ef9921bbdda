"""RLlib, new API stack: PPO or IMPALA with a custom RLModule on a vector env around EnvPool; the learner is local."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import ray
from gymnasium.vector import AutoresetMode, VectorEnv
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune.registry import register_env

from job import NUM_ACTIONS, RAW, Job, arguments, levels_of, make_pool, usable_cores, versions
from network import Trunk, head


class EnvPoolVectorEnv(VectorEnv):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int, seed: int) -> None:
        self._pool = make_pool(num_envs, channel_first=False, seed=seed, num_threads=1)
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._pool.reset()[0], {}

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, _ = self._pool.step(np.asarray(actions, dtype=np.int32))
        return observations, rewards, terminated, truncated, {}


class ImpalaModule(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        self.trunk = Trunk()
        self.policy = head(NUM_ACTIONS, 0.01)
        self.value = head(1, 1.0)

    def _features(self, batch: dict[str, Any]) -> Any:
        return self.trunk(batch[Columns.OBS].permute(0, 3, 1, 2).float() / 255.0)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.policy(self._features(batch))}

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        features = self._features(batch)
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.EMBEDDINGS: features}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Any:
        return self.value(self._features(batch) if embeddings is None else embeddings).squeeze(-1)


def make_config(job: Job, runners: int) -> AlgorithmConfig:
    shared: dict[str, Any] = {
        "lr": job.learning_rate,
        "gamma": job.gamma,
        "train_batch_size_per_learner": job.rollout if job.algorithm == "ppo" else job.batch_size,
        "vf_loss_coeff": job.value,
        "entropy_coeff": job.entropy,
        "grad_clip": job.max_grad_norm,
    }
    config: AlgorithmConfig
    if job.algorithm == "ppo":
        config = PPOConfig().training(
            minibatch_size=job.batch_size,
            num_epochs=job.epochs,
            lambda_=job.gae_lambda,
            clip_param=job.clip,
            use_kl_loss=False,
            **shared,
        )
    else:
        config = IMPALAConfig().training(**shared).reporting(min_time_s_per_iteration=1)
    return (
        config.environment("coinrun")
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=job.num_envs // runners,
            rollout_fragment_length=job.n_steps,
            gym_env_vectorize_mode=gym.VectorizeMode.VECTOR_ENTRY_POINT,
        )
        .learners(num_learners=0)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=ImpalaModule))
        .debugging(seed=job.seed)
    )


def main() -> None:
    args = arguments()
    job: Job = args.job
    cores = usable_cores()
    # PPO samples and learns in turns, so every core may sample; IMPALA learns all the time.
    runners = cores if job.algorithm == "ppo" else max(1, cores - 1)
    while job.num_envs % runners:
        runners -= 1
    ray.init(num_cpus=cores + 1, include_dashboard=False, log_to_driver=False)
    register_env("coinrun", lambda context: EnvPoolVectorEnv(context["num_envs"], seed=os.getpid()))
    algorithm = make_config(job, runners).build_algo()
    module = algorithm.learner_group._learner.module["default_policy"]
    args.report.count(module.trunk, module)
    args.report.facts(
        num_envs=runners * (job.num_envs // runners),
        levels=levels_of(make_pool(1, channel_first=False, seed=0)),
        reward=RAW,
        precision="float32",
        setting=f"{runners} env runners, local learner",
        versions=versions("ray"),
    )
    args.report.update(0)
    while True:
        sampled = algorithm.train()["env_runners"].get("num_env_steps_sampled_lifetime", 0)
        if sampled > 0:  # IMPALA may come back before anything has arrived
            args.report.update(int(sampled))


if __name__ == "__main__":
    main()
