"""What a parent process has to know of the environment and the network to lay out the memory its workers share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.env.environments import PROCGEN, Spaces, make_env
from rl_cluster_benchmark.nets.models import make_model


@dataclass(frozen=True)
class Task:
    observation_shape: tuple[int, ...]
    observation_dtype: torch.dtype
    num_actions: int
    num_parameters: int
    hidden_shape: tuple[int, int] | None = None  # [outputs, inputs] of the layer behind the convolutions, if any

    @classmethod
    def of(cls, config: Config) -> Task:
        """Find out by building a network, and an environment unless its shapes are known, as those of Procgen are."""
        env: Spaces = PROCGEN if config.env.game is not None else make_env(config.env, [0], num_threads=1)
        model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, torch.float32)
        hidden = getattr(model.trunk, "hidden", None)
        return cls(
            env.observation_shape,
            torch.from_numpy(np.empty(0, env.observation_dtype)).dtype,
            env.num_actions,
            sum(parameter.numel() for parameter in model.parameters()),
            (hidden.out_features, hidden.in_features) if isinstance(hidden, nn.Linear) else None,
        )


def deal(num_envs: int, num_workers: int) -> list[list[int]]:
    """Return the environments of each worker, as even shares."""
    return [list(map(int, shard)) for shard in np.array_split(np.arange(num_envs), num_workers)]
