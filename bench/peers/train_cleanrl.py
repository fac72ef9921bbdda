"""PPO in one file with the setting that CleanRL publishes for Procgen (ppo_procgen): our own lines, not its code.

Like there, images stay [64, 64, 3] and are kept as float32, the network permutes them, values are clipped like the
policy, advantages are normalised per minibatch, and rewards by the running deviation of the discounted return, cut
at 10.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Categorical

from job import NORMALISED, NUM_ACTIONS, Job, arguments, versions
from network import ActorCritic
from same_step_env import SameStepEnv


class RewardScale:
    def __init__(self, num_envs: int, gamma: float) -> None:
        self._returns, self._gamma = np.zeros(num_envs), gamma
        self._count, self._mean, self._variance = 1e-4, 0.0, 1.0

    def __call__(self, rewards: NDArray, dones: NDArray) -> NDArray:
        self._returns = self._returns * self._gamma + rewards
        count = self._count + len(rewards)
        delta = self._returns.mean() - self._mean
        spread = self._variance * self._count + self._returns.var() * len(rewards)
        self._variance = (spread + delta**2 * self._count * len(rewards) / count) / count
        self._mean, self._count = self._mean + delta * len(rewards) / count, count
        self._returns[dones] = 0
        return np.clip(rewards / np.sqrt(self._variance + 1e-8), -10, 10)


def advantages_of(rewards: Tensor, values: Tensor, dones: Tensor, last_value: Tensor, job: Job) -> Tensor:
    """GAE; dones[t] says that step t ended an episode. All but last_value are [T, N]."""
    advantages, carried = torch.zeros_like(rewards), torch.zeros_like(last_value)
    for t in reversed(range(len(rewards))):
        following = last_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + job.gamma * following * (1 - dones[t]) - values[t]
        carried = delta + job.gamma * job.gae_lambda * (1 - dones[t]) * carried
        advantages[t] = carried
    return advantages


def loss_of(model: ActorCritic, batch: tuple[Tensor, ...], job: Job) -> Tensor:
    observations, actions, old_log_probs, old_values, advantages, returns = batch
    logits, values = model(observations)
    distribution = Categorical(logits=logits)
    ratio = (distribution.log_prob(actions) - old_log_probs).exp()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - job.clip, 1 + job.clip)).mean()
    clipped = old_values + (values - old_values).clamp(-job.clip, job.clip)
    value = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    return policy - job.entropy * distribution.entropy().mean() + job.value * value


def main() -> None:
    args = arguments()
    job: Job = args.job
    torch.manual_seed(job.seed)
    env = SameStepEnv(job.num_envs, channel_first=False, seed=job.seed)
    model = ActorCritic(NUM_ACTIONS)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.learning_rate, eps=1e-5)
    args.report.count(model.trunk, model)
    args.report.facts(
        num_envs=job.num_envs,
        levels=env.levels,
        reward=NORMALISED,
        precision="float32",
        setting="one process, torch's threads",
        versions=versions(),
    )
    shape = (job.n_steps, job.num_envs)
    observations = torch.zeros((*shape, 64, 64, 3))
    actions, log_probs, values, rewards, dones = (torch.zeros(shape) for _ in range(5))
    scale = RewardScale(job.num_envs, job.gamma)
    frame, steps = torch.as_tensor(env.reset(), dtype=torch.float32), 0
    args.report.update(steps)
    while True:
        for t in range(job.n_steps):
            with torch.no_grad():
                logits, values[t] = model(frame)
            distribution = Categorical(logits=logits)
            action = distribution.sample()
            observations[t], actions[t], log_probs[t] = frame, action, distribution.log_prob(action)
            step = env.step(action.numpy())
            ended = step.terminated | step.truncated
            rewards[t], dones[t] = torch.as_tensor(scale(step.rewards, ended)), torch.as_tensor(ended)
            frame = torch.as_tensor(step.observations, dtype=torch.float32)
            steps += job.num_envs
        with torch.no_grad():
            advantages = advantages_of(rewards, values, dones, model(frame)[1], job)
        data = (observations, actions, log_probs, values, advantages, advantages + values)
        flat = [tensor.flatten(0, 1) for tensor in data]
        for _ in range(job.epochs):
            for indices in torch.as_tensor(np.random.permutation(job.rollout)).split(job.batch_size):
                loss = loss_of(model, tuple(tensor[indices] for tensor in flat), job)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
                optimizer.step()
        args.report.update(steps)


if __name__ == "__main__":
    main()
