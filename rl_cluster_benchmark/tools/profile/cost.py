"""What a sample costs the network: multiplications and additions, counted exactly, and bytes, estimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.env.environments import PROCGEN, Spaces, make_env
from rl_cluster_benchmark.nets.models import make_model

# Of each parameter in a step, 4 bytes each time: the gradient is cleared, summed (read, written) and measured; then it
# is used, and the parameter and two moments are read and written.
GRADIENT_BYTES, STEP_BYTES = 4 * (1 + 2 + 1), 4 * (1 + 3 * 2)


@dataclass(frozen=True)
class Cost:
    """What one sample costs; a multiplication and an addition are two operations."""

    forward_flops: int
    backward_flops: int
    num_parameters: int
    observation_bytes: int
    activation_values: int  # that the layers of a forward pass read and write

    def bytes_at_most(self, precision: str) -> tuple[float, float]:
        """Return (forward, backward) if whatever a layer reads and writes goes through memory.

        Backward, a layer reads its input and, for the gradients of input and weights, twice that of its output.
        """
        size = 2 if precision == "bfloat16" else 4
        forward = self.observation_bytes + size * self.activation_values
        return forward, 2 * size * self.activation_values

    def bytes_at_least(self) -> float:
        """Return the bytes of a sample if everything of a pass but the observation stays in the cache."""
        return float(self.observation_bytes)

    def bytes_per_step(self, num_learning: int, *, divided: bool) -> float:
        """Return the bytes of an optimiser step; `divided` says whether the learners share its work."""
        times = 1 if divided else num_learning
        return float((GRADIENT_BYTES * num_learning + STEP_BYTES * times) * self.num_parameters)


def of_network(config: Config) -> Cost:
    env: Spaces = PROCGEN if config.env.game is not None else make_env(config.env, [0], num_threads=1)
    model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, torch.float32)
    observations = torch.zeros(1, *env.observation_shape, dtype=torch.from_numpy(_empty(env)).dtype)
    values = _count_activations(model, observations)
    with FlopCounterMode(display=False) as counter:
        logits, state_values = model(observations)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        (logits.sum() + state_values.sum()).backward()
    return Cost(
        forward_flops=forward,
        backward_flops=counter.get_total_flops(),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        observation_bytes=observations.numel() * observations.element_size(),
        activation_values=values,
    )


def _empty(env: Spaces) -> Any:
    import numpy as np

    return np.empty(0, env.observation_dtype)


def _count_activations(model: nn.Module, observations: Tensor) -> int:
    total = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        total += inputs[0].numel() + output.numel()

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model(observations)
    for hook in hooks:
        hook.remove()
    return total
