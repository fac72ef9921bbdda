"""Sample Factory: APPO. "ppo" is its synchronous mode with three epochs, "impala" its asynchronous one with one epoch.

Options follow its EnvPool examples: one pool a worker, sampling in batches. Its processes are spawned and read this
file again, so what they need stands outside main().
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium as gym
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import ActorCritic, default_make_actor_critic_func
from sample_factory.train import make_runner

from job import RAW, Job, arguments, levels_of, make_pool, usable_cores, versions
from same_step_env import SameStepEnv

ARGS = arguments()
JOB: Job = ARGS.job
WORKERS = min(usable_cores(), JOB.num_envs)
ENVS_PER_WORKER = JOB.num_envs // WORKERS


class BatchedEnv(gym.Env):
    """Sample Factory's batched interface: it is given the frame that follows a reset."""

    def __init__(self, seed: int) -> None:
        self._env = SameStepEnv(ENVS_PER_WORKER, channel_first=True, seed=seed, num_threads=1)
        self.num_agents = ENVS_PER_WORKER
        self.is_multiagent = True
        self.observation_space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
        self.action_space = gym.spaces.Discrete(self._env.pool.action_space.n)

    def reset(self, **_: Any) -> Any:
        return self._env.reset(), {}

    def step(self, actions: Any) -> Any:
        step = self._env.step(actions)
        return step.observations, step.rewards, step.terminated, step.truncated, {}


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> BatchedEnv:
    return BatchedEnv(seed=JOB.seed + (env_config.env_id if env_config else 0))


def make_network(*args: Any) -> ActorCritic:
    network = default_make_actor_critic_func(*args)
    ARGS.report.count(network.encoder, network)
    return network


class Watch(AlgoObserver):
    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        ARGS.report.update(sum(runner.env_steps.values()))


def options(train_dir: str) -> list[str]:
    chosen = {
        "algo": "APPO", "env": "coinrun", "experiment": "peers", "train_dir": train_dir, "device": "cpu",
        "num_workers": WORKERS, "num_envs_per_worker": 1, "worker_num_splits": 1, "batched_sampling": True,
        "async_rl": JOB.algorithm == "impala", "serial_mode": False,
        "rollout": JOB.n_steps, "batch_size": JOB.batch_size, "num_epochs": JOB.epochs,
        "num_batches_per_epoch": 1 if JOB.algorithm == "impala" else JOB.minibatches, "shuffle_minibatches": True,
        "use_rnn": False, "recurrence": 1, "with_vtrace": False,  # V-trace fails in 2.1.1
        "encoder_conv_architecture": "resnet_impala", "encoder_conv_mlp_layers": 256, "nonlinearity": "relu",
        "obs_scale": 255.0, "normalize_input": False, "normalize_returns": False, "reward_scale": 1.0,
        "gamma": JOB.gamma, "gae_lambda": JOB.gae_lambda, "ppo_clip_ratio": JOB.clip,
        "exploration_loss_coeff": JOB.entropy, "value_loss_coeff": JOB.value,
        "max_grad_norm": JOB.max_grad_norm, "learning_rate": JOB.learning_rate,
        "seed": JOB.seed, "adam_eps": 1e-5, "kl_loss_coeff": 0.0, "train_for_env_steps": 10**9,
    }  # fmt: skip
    return [f"--{key}={value}" for key, value in chosen.items()]


def main() -> None:
    ARGS.report.facts(
        num_envs=WORKERS * ENVS_PER_WORKER,
        levels=levels_of(make_pool(1, channel_first=True, seed=0)),
        reward=RAW,
        precision="float32",
        setting=f"{'asynchronous' if JOB.algorithm == 'impala' else 'synchronous'}, {WORKERS} workers, 1 learner",
        versions=versions("sample-factory"),
    )
    register_env("coinrun", make_env)
    global_model_factory().register_actor_critic_factory(make_network)
    with tempfile.TemporaryDirectory() as folder:
        argv = options(folder)
        parser, _ = parse_sf_args(argv=argv)
        _, runner = make_runner(parse_full_cfg(parser, argv))
        runner.register_observer(Watch())
        ARGS.report.update(0)
        runner.init()
        runner.run()


if __name__ == "__main__":
    main()
