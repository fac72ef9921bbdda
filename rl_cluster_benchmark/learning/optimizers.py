"""Adam and RMSprop on one flat vector.

Adam's step is torch's own fused kernel. `torch.optim.Adam` calls it too, but its constructor imports torch's compiler,
which nothing here uses and which takes a second and 90 MB in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rl_cluster_benchmark.config.schema import TrainingConfig


class Optimizer(Protocol):
    parameters: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]
    steps: Tensor

    def step(self, learning_rate: float) -> None: ...


class Adam:
    """Adam (Kingma and Ba, 2015) on one flat vector."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, parameters: Tensor, gradient: Tensor, *, eps: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        self.parameters, self.gradient, self.eps, self.betas = parameters, gradient, eps, betas
        self.moments = {name: torch.zeros_like(parameters) for name in self.MOMENTS}
        self.steps = torch.zeros((), device=parameters.device)

    def step(self, learning_rate: float) -> None:
        self.steps += 1
        torch._fused_adam_(
            [self.parameters],
            [self.gradient],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],
            [self.steps],
            lr=learning_rate,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


class RMSprop:
    """RMSprop on one flat vector: the gradient is divided by the root of its running mean square.

    The mean square starts at zero, so the first step is ten learning rates long for every parameter, whatever its
    gradient. With `bias_correction` the mean square is divided by the sum of its weights, as in Adam: then the first
    step is one learning rate long.
    """

    MOMENTS = ("square_avg",)

    def __init__(
        self, parameters: Tensor, gradient: Tensor, *, eps: float, bias_correction: bool = False, alpha: float = 0.99
    ) -> None:
        self.parameters, self.gradient, self.eps, self.alpha = parameters, gradient, eps, alpha
        self.bias_correction = bias_correction
        self.moments = {name: torch.zeros_like(parameters) for name in self.MOMENTS}
        self.steps = torch.zeros((), device=parameters.device)

    def step(self, learning_rate: float) -> None:
        self.steps += 1
        square_avg = self.moments["square_avg"]
        square_avg.mul_(self.alpha).addcmul_(self.gradient, self.gradient, value=1 - self.alpha)
        root = square_avg.sqrt()
        if self.bias_correction:
            root.mul_((1 - self.alpha ** float(self.steps)) ** -0.5)
        self.parameters.addcdiv_(self.gradient, root.add_(self.eps), value=-learning_rate)


def optimizer_of(training: TrainingConfig) -> Callable[[Tensor, Tensor], Optimizer]:
    """Return the function that makes the config's optimiser from the parameters and their gradient."""
    if training.optimizer == "rmsprop":
        return partial(RMSprop, eps=training.adam_eps, bias_correction=training.rmsprop_bias_correction)
    return partial(Adam, eps=training.adam_eps)


OPTIMIZERS: dict[str, type[Adam] | type[RMSprop]] = {"adam": Adam, "rmsprop": RMSprop}
