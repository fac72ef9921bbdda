"""Adam and RMSprop on one flat vector.

Adam's step is torch's own fused kernel. `torch.optim.Adam` calls it too, but building that imports torch's compiler: a
second of start-up and 90 MB in every process, and nothing here is compiled.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    parameters: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]
    steps: Tensor

    def step(self, learning_rate: float) -> None: ...


class Adam:
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
    MOMENTS = ("square_avg",)

    def __init__(self, parameters: Tensor, gradient: Tensor, *, eps: float, alpha: float = 0.99) -> None:
        self.parameters, self.gradient, self.eps, self.alpha = parameters, gradient, eps, alpha
        self.moments = {name: torch.zeros_like(parameters) for name in self.MOMENTS}
        self.steps = torch.zeros((), device=parameters.device)

    def step(self, learning_rate: float) -> None:
        self.steps += 1
        square_avg = self.moments["square_avg"]
        square_avg.mul_(self.alpha).addcmul_(self.gradient, self.gradient, value=1 - self.alpha)
        self.parameters.addcdiv_(self.gradient, square_avg.sqrt().add_(self.eps), value=-learning_rate)


OPTIMIZERS: dict[str, type[Adam] | type[RMSprop]] = {"adam": Adam, "rmsprop": RMSprop}
