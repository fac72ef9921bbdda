"""One process: collect a rollout, learn from it, again."""

from __future__ import annotations

from typing import Any

import torch

from rl_cluster_benchmark import hardware
from rl_cluster_benchmark.algorithms.learner import alone
from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.envs import make_env
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.models import ActorCritic, make_model
from rl_cluster_benchmark.rollout import Collector
from rl_cluster_benchmark.run.run import Run
from rl_cluster_benchmark.seeding import integer_seed


def train(run: Run) -> None:
    config, plan = run.config, run.plan
    env_ids = range(config.env.num_envs)
    env = make_env(config.env, env_ids, num_threads=plan.num_threads, incarnation=run.updates)
    torch.manual_seed(integer_seed(config.env.seed, "model"))
    model = make_model(
        config.model, env.observation_shape, env.num_actions, config.hardware, hardware.dtype(plan.precision)
    )
    algorithm = PPO(config, model, env_ids=env_ids, micro_batch=plan.micro_batch, reduce=alone)
    if run.resumed_from is not None:
        load_weights(model, run.resumed_from)
        algorithm.load_state_dict(run.resumed_from["algorithm"])

    def learner_state() -> dict[str, Any]:
        return {
            "model": {name: tensor.cpu().contiguous().clone() for name, tensor in model.state_dict().items()},
            "algorithm": algorithm.state_dict(),
            "observation_shape": list(env.observation_shape),
            "num_actions": env.num_actions,
        }

    collector = Collector(
        env,
        model,
        n_steps=config.training.n_steps,
        env_ids=env_ids,
        seed=config.env.seed,
        device=config.hardware.device,
        clock=run.clock,
    )
    run.start(learner_state)
    while not run.is_over():
        rollout = collector.collect(run.updates, run.should_stop)
        if rollout is None:
            break
        with run.clock.phase("update"):
            losses = algorithm.update(rollout, index=run.updates, progress=run.fraction, interrupted=run.interrupted)
        run.record(rollout.num_steps, rollout.episodes, losses)


def load_weights(model: ActorCritic, checkpoint: dict[str, Any]) -> None:
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError:
        raise UserError(
            "The checkpoint's weights do not fit this network; leave model.* and the environment as they were in "
            f"training (model: {checkpoint['config']['model']}, env: {checkpoint['config']['env']['name']})."
        ) from None
