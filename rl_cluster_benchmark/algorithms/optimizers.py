"""Adam on one flat vector.

The step is torch's own fused kernel. `torch.optim.Adam` calls the same one, but building it imports torch's compiler:
a second of start-up and 90 MB in every process, and nothing here is compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Adam:
    def __init__(self, parameters: Tensor, gradient: Tensor, *, eps: float, betas: tuple[float, float] = (0.9, 0.999)):
        self.parameters, self.gradient, self.eps, self.betas = parameters, gradient, eps, betas
        self.moments = {"exp_avg": torch.zeros_like(parameters), "exp_avg_sq": torch.zeros_like(parameters)}
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
