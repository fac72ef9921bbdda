"""A model's parameters and gradients as two flat vectors, and the optimisers that update the parameters.

Clipping, the optimiser's step and the sum over workers each are one operation on a flat vector instead of forty.
Adam's step is torch's own fused kernel. `torch.optim.Adam` calls it too, but its constructor imports torch's compiler,
which nothing here uses and which takes a second and 90 MB in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_cluster_benchmark.config.schema import TrainingConfig
from rl_cluster_benchmark.core.timing import beat
from rl_cluster_benchmark.kernels.minibatch_pass import Vectors
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


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
        self, parameters: Tensor, gradient: Tensor, moments: dict[str, Tensor] | None = None,
        steps: Tensor | None = None, *, eps: float, betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:  # fmt: skip
        self.parameters, self.gradient, self.eps, self.betas = parameters, gradient, eps, betas
        self.moments = moments or {name: torch.zeros_like(parameters) for name in self.MOMENTS}
        self.steps = torch.zeros((), device=parameters.device) if steps is None else steps

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
        self, parameters: Tensor, gradient: Tensor, moments: dict[str, Tensor] | None = None,
        steps: Tensor | None = None, *, eps: float, bias_correction: bool = False, alpha: float = 0.99,
    ) -> None:  # fmt: skip
        self.parameters, self.gradient, self.eps, self.alpha = parameters, gradient, eps, alpha
        self.bias_correction = bias_correction
        self.moments = moments or {name: torch.zeros_like(parameters) for name in self.MOMENTS}
        self.steps = torch.zeros((), device=parameters.device) if steps is None else steps

    def step(self, learning_rate: float) -> None:
        self.steps += 1
        square_avg = self.moments["square_avg"]
        square_avg.mul_(self.alpha).addcmul_(self.gradient, self.gradient, value=1 - self.alpha)
        root = square_avg.sqrt()
        if self.bias_correction:
            root.mul_((1 - self.alpha ** float(self.steps)) ** -0.5)
        self.parameters.addcdiv_(self.gradient, root.add_(self.eps), value=-learning_rate)


def optimizer_of(training: TrainingConfig) -> Callable[..., Optimizer]:
    """Return what makes the config's optimiser, of (parameters, gradient, moments, steps)."""
    if training.optimizer == "rmsprop":
        return partial(RMSprop, eps=training.adam_eps, bias_correction=training.rmsprop_bias_correction)
    return partial(Adam, eps=training.adam_eps)


OPTIMIZERS: dict[str, type[Adam] | type[RMSprop]] = {"adam": Adam, "rmsprop": RMSprop}


class Alone(Reducer):
    """The reducer of a single worker: every sum is the worker's own tensor."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor

    running_sum = __call__

    def vector(self, size: int) -> Tensor:
        return torch.zeros(size)

    def total(self, vector: Tensor) -> Tensor:
        return vector


class GradientVector:
    """A vector that passes add to: the gradient of all parameters, followed by the loss statistics."""

    def __init__(self, model: ActorCritic, vector: Tensor, size: int, left_out: slice) -> None:
        self.stats = vector[size:]
        self.parts = list(views(model, vector[:size]).values())  # the gradient of each parameter
        self.written = vector[: left_out.start], vector[left_out.stop :]  # everything that passes add to


class Learner:
    """The parameters of a model, their gradient, and the optimiser, together with other workers if there are any.

    `moments` are those of the optimiser by name, each a flat vector over all parameters.
    """

    moments: dict[str, Tensor]

    def __init__(
        self,
        model: ActorCritic,
        *,
        optimizer: Callable[..., Optimizer],
        max_grad_norm: float,
        num_stats: int,
        reduce: Reducer,
        sharing: Sharing | None = None,
    ) -> None:
        self.model, self.max_grad_norm, self.reduce = model, max_grad_norm, reduce
        parameters = dict(model.named_parameters())
        size = sum(p.numel() for p in parameters.values())
        device = next(iter(parameters.values())).device
        self.flat = sharing.parameters(size) if sharing else torch.zeros(size, device=device)
        # The loss statistics follow the gradient in one vector, so that one reduction sums both.
        self._own = self._total = reduce.vector(size + num_stats).to(device).zero_()
        self.grad = self._own[:size]
        move_parameters(model, self.flat)
        self.hidden = sharing.hidden if sharing and model.native_trunk else None
        left_out = slice(0, 0)  # the part of the gradient that passes do not write
        if self.hidden is not None and model.native_trunk is not None:
            left_out = place_of(model, model.native_trunk.hidden_weights)
            self.hidden.connect(model.native_trunk, left_out)
        vectors = (self._own, *(sharing.vectors(size + num_stats) if sharing else ()))
        self._vectors = [GradientVector(model, vector, size, left_out) for vector in vectors]
        self._parameters = list(model.parameters())  # listed once: walking over a model takes as long as a sample
        self.write_to(0)
        self._sharing, self._stepped = sharing, sharing.part(size) if sharing else slice(0, size)
        # Before the run starts, all workers write the same values to what they share, and then meet.
        if sharing is not None:  # the parameters and the optimiser's moments, of which each worker steps a part
            part, self.moments = self.flat[self._stepped], sharing.moments(size)
            moments = {name: whole[self._stepped] for name, whole in self.moments.items()}
            self.optimizer = optimizer(part, torch.zeros_like(part), moments)
        elif (memory := reduce.optimizer_memory()) is not None:
            self.optimizer = optimizer(memory.parameters, self.grad, memory.moments, memory.steps)
            self.moments = memory.moments
        else:
            self.optimizer = optimizer(self.flat, self.grad)
            self.moments = self.optimizer.moments

    @property
    def max_pieces(self) -> int:
        """Return how many pieces of shared work there are gradient vectors for."""
        return len(self._vectors) - 1

    def write_to(self, index: int) -> None:
        """Let backward passes add to this worker's own gradient, 0, or to that of piece index - 1 of shared work."""
        self.written_to, self._current = index, self._vectors[index]
        self.stats = self._current.stats
        for parameter, part in zip(self._parameters, self._current.parts, strict=True):
            parameter.grad = part

    @cached_property
    def vectors_in_c(self) -> Vectors:
        """Return the gradient vectors in the form that passes in C take."""
        return Vectors((vector.parts, vector.stats, vector.written) for vector in self._vectors)

    def zero_grad(self) -> None:
        """Set the current gradient and statistics to zero.

        model.zero_grad() must not be used: it would unlink the model's gradients from the flat vector.
        """
        for part in self._current.written:
            part.zero_()

    def sum_over_workers(self) -> list[float]:
        """Sum gradient and statistics over all workers; return the summed statistics."""
        self._total = self.reduce.total(self._own)
        statistics: list[float] = self._total[len(self.flat) :].tolist()
        return statistics

    def step(self, learning_rate: float, losses: Sequence[float] = (), divisor: float = 1.0) -> float:
        """Divide the gradient by `divisor`, clip it, step, and return its norm before clipping.

        Where the norm or a loss is not finite, the parameters stay as they are.
        """
        beat()
        total = self._total[: len(self.flat)]
        norm = float(total.norm()) / divisor
        if is_finite(*losses, norm):
            scale = (self.max_grad_norm / (norm + 1e-6) if norm > self.max_grad_norm else 1.0) / divisor
            torch.mul(total[self._stepped], scale, out=self.optimizer.gradient)
            self.optimizer.step(learning_rate)
            if self._sharing is not None:
                self._sharing.meet()
            self.model.weights_changed()
        return norm

    def vectors(self) -> list[Tensor]:
        """Return the flat vectors that a step changes: the parameters and the optimiser's moments."""
        return [self.flat, *self.moments.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state by parameter name, in contiguous layout: a later load may use another one."""
        return {
            "steps": float(self.optimizer.steps),
            "moments": {
                key: {name: view.cpu().contiguous().clone() for name, view in views(self.model, flat).items()}
                for key, flat in self.moments.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.steps.fill_(state["steps"])
        for key, tensors in state["moments"].items():
            for name, view in views(self.model, self.moments[key]).items():
                view.copy_(tensors[name])


def move_parameters(model: ActorCritic, flat: Tensor) -> None:
    """Copy the model's parameters into the flat vector, and make them views of it."""
    with torch.no_grad():
        for (name, parameter), view in zip(model.named_parameters(), views(model, flat).values(), strict=True):
            assert parameter.shape == view.shape, name
            view.copy_(parameter.data)
            parameter.data = view


def views(model: ActorCritic, flat: Tensor) -> dict[str, Tensor]:
    """Return each parameter's part of a flat vector by name, as a view in the parameter's shape and memory order."""
    found = {}
    for (name, parameter), place in zip(model.named_parameters(), places(model), strict=True):
        part = flat[place]
        if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
            out_channels, in_channels, height, width = parameter.shape
            found[name] = part.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)
        else:
            found[name] = part.view(parameter.shape)
    return found


def places(model: ActorCritic) -> Iterator[slice]:
    """Yield the slice that each parameter takes in a flat vector, in the order of the model's parameters."""
    start = 0
    for parameter in model.parameters():
        yield slice(start, start + parameter.numel())
        start += parameter.numel()


def place_of(model: ActorCritic, parameter: Tensor) -> slice:
    """Return the slice that this parameter takes in a flat vector."""
    return next(place for each, place in zip(model.parameters(), places(model), strict=True) if each is parameter)


def is_finite(*values: float) -> bool:
    return all(map(math.isfinite, values))
