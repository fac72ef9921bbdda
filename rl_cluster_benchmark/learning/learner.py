"""A model's parameters and gradients as two flat vectors, and the optimiser that updates the parameters.

Clipping, the optimiser's step and the sum over workers each are one operation on a flat vector instead of forty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.core.timing import beat
from rl_cluster_benchmark.kernels.minibatch_pass import Vectors
from rl_cluster_benchmark.learning.optimizers import Optimizer
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.nets.models import ActorCritic


class GradientVector:
    """A vector that passes add to: the gradient of all parameters, followed by the loss statistics."""

    def __init__(self, model: ActorCritic, vector: Tensor, size: int, left_out: slice) -> None:
        self.stats = vector[size:]
        self.parts = list(views(model, vector[:size]).values())  # the gradient of each parameter
        self.written = vector[: left_out.start], vector[left_out.stop :]  # everything that passes add to


class Learner:
    """The parameters of a model, their gradient, and the optimiser, together with other workers if there are any."""

    def __init__(
        self,
        model: ActorCritic,
        *,
        optimizer: Callable[[Tensor, Tensor], Optimizer],
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
        # Workers that share work also share the parameters and the optimiser's moments, and each steps a part of them.
        # Before the run starts, all write the same values there, and then meet.
        self._sharing, self._stepped = sharing, sharing.part(size) if sharing else slice(0, size)
        self._shared_moments = sharing.moments(size) if sharing else None
        self.optimizer = optimizer(self.flat[self._stepped], self.grad)
        if self._shared_moments is not None:
            self.optimizer.gradient = torch.zeros_like(self.optimizer.parameters)
            self.optimizer.moments = {name: whole[self._stepped] for name, whole in self._shared_moments.items()}

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

    @property
    def moments(self) -> dict[str, Tensor]:
        """Return the optimiser's moments by name, each a flat vector over all parameters."""
        return self._shared_moments or self.optimizer.moments

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
