"""torchrl: PPO or A2C from its own parts (collector, GAE, buffer without replacement, loss), on its EnvPool wrapper.

As in its examples, policy and value share the trunk; the value head reads the features that the policy has computed,
and advantages are computed once for all epochs, so that no sample passes the network more often than elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import ExplorationType, MultiThreadedEnvWrapper, set_gym_backend
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.value import GAE

from job import NUM_ACTIONS, RAW, Job, arguments, levels_of, make_pool, versions
from network import Trunk, head


class EnvPoolEnv(MultiThreadedEnvWrapper):
    """Its own wrapper reads EnvPool's spaces as those of the old gym; they are gymnasium's now."""

    def _make_specs(self, env: Any) -> None:
        with set_gym_backend("gymnasium"):
            self.action_spec = self._get_action_spec()
            specs = self._get_output_spec()
        self.observation_spec = specs["full_observation_spec"]
        self.reward_spec = specs["full_reward_spec"]
        self.done_spec = specs["full_done_spec"]


class Images(nn.Module):
    """Frames [..., 3, 64, 64] of bytes, with any dimensions before -> features."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()

    def forward(self, observations: Tensor) -> Tensor:
        features = self.trunk(observations.flatten(0, -4).float() / 255.0)
        return features.unflatten(0, observations.shape[:-3])


def make_network(action_spec: Any) -> ActorValueOperator:
    policy = ProbabilisticActor(
        TensorDictModule(head(NUM_ACTIONS, 0.01), in_keys=["features"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=action_spec,
        distribution_class=Categorical,
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    return ActorValueOperator(
        TensorDictModule(Images(), in_keys=["observation"], out_keys=["features"]),
        policy,
        ValueOperator(head(1, 1.0), in_keys=["features"]),
    )


def make_loss(job: Job, network: ActorValueOperator) -> Any:
    policy, value = network.get_policy_operator(), network.get_value_head()
    if job.algorithm == "a2c":
        return A2CLoss(policy, value, loss_critic_type="l2", entropy_coeff=job.entropy, critic_coeff=job.value)
    return ClipPPOLoss(
        policy,
        value,
        clip_epsilon=job.clip,
        loss_critic_type="l2",
        entropy_coeff=job.entropy,
        critic_coeff=job.value,
        normalize_advantage=True,
    )


def make_optimizer(job: Job, loss: nn.Module) -> torch.optim.Optimizer:
    if job.algorithm == "a2c":
        return torch.optim.RMSprop(loss.parameters(), lr=job.learning_rate, alpha=0.99, eps=1e-5)
    return torch.optim.Adam(loss.parameters(), lr=job.learning_rate, eps=1e-5)


def main() -> None:
    args = arguments()
    job: Job = args.job
    torch.manual_seed(job.seed)
    pool = make_pool(job.num_envs, channel_first=True, seed=job.seed)
    env = EnvPoolEnv(pool)
    network = make_network(env.action_spec)
    advantages = GAE(
        gamma=job.gamma,
        lmbda=job.gae_lambda,
        value_network=network.get_value_operator(),
        average_gae=False,
        shifted=True,
    )
    loss_module = make_loss(job, network)
    optimizer = make_optimizer(job, loss_module)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(job.rollout), sampler=SamplerWithoutReplacement(), batch_size=job.batch_size
    )
    args.report.count(network.module[0].module.trunk, network)
    args.report.facts(
        num_envs=job.num_envs,
        levels=levels_of(pool),
        reward=RAW,
        precision="float32",
        setting="one process, torch's threads",
        versions=versions("torchrl", "tensordict"),
    )
    collector = Collector(
        env, network.get_policy_operator(), frames_per_batch=job.rollout, total_frames=-1, device="cpu"
    )
    steps = 0
    args.report.update(steps)
    for data in collector:
        for key in (
            "reward",
            "done",
            "terminated",
        ):  # its EnvPool wrapper lacks the dimension that its GAE expects
            data["next", key] = data["next", key].unsqueeze(-1)
        with torch.no_grad():
            data = advantages(data)
        steps += data.numel()
        for _ in range(job.epochs):
            buffer.extend(data.reshape(-1))
            for batch in buffer:
                losses = loss_module(batch)
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), job.max_grad_norm)
                optimizer.step()
        args.report.update(steps)


if __name__ == "__main__":
    main()
