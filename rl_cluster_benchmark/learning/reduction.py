"""What an algorithm sees of the other workers: a sum over all of them, and work that it may share with some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_cluster_benchmark.kernels.native_network import HiddenRows, NativeTrunk
    from rl_cluster_benchmark.learning.batch import Batch


class Reducer(Protocol):
    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over all workers, in place. All must call it, in the same order."""
        ...

    def vector(self, size: int) -> Tensor:
        """A float32 vector for what is summed most: it may lie where the others can read it."""
        ...

    def total(self, vector: Tensor) -> Tensor:
        """The sum of these over all workers, which may lie where all of them read it: not to be changed, and gone with
        the next call of any kind.
        """
        ...


class Alone:
    """One worker: nothing to add."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor

    def vector(self, size: int) -> Tensor:
        return torch.zeros(size)

    def total(self, vector: Tensor) -> Tensor:
        return vector


class HiddenLayer(Protocol):
    """That of the hidden layer's weights, made once for a minibatch, from a row that passes leave for each sample."""

    @property
    def rows(self) -> HiddenRows:
        """Of all samples of a minibatch."""
        ...

    def connect(self, trunk: NativeTrunk, part: slice) -> None:
        """The network, and where in the vector of its gradient these weights are."""
        ...

    def begin(self, num_samples: int) -> None:
        """A minibatch. The next sum of the gradient is that of its rows."""
        ...

    def place(self, start: int, count: int) -> None:
        """Of the samples of the next pass in the minibatch."""
        ...


class Sharing(Protocol):
    """Workers that can read each other's experience, so that any of them can compute on it."""

    rank: int
    env_ids: Sequence[int]  # of all their environments, in the order of the batch's columns
    owners: Sequence[int]  # the worker that each of these belongs to
    fraction: float  # of a minibatch, that goes to whoever is free

    @property
    def hidden(self) -> HiddenLayer | None: ...

    def batch(self, weights: Tensor, advantages: Tensor, returns: Tensor) -> Batch:
        """Everyone's samples, these of one's own included."""
        ...

    def parameters(self, size: int) -> Tensor:
        """Where they lie for all of them: each steps a part."""
        ...

    def moments(self, size: int) -> dict[str, Tensor]:
        """The same for those of the optimiser, by name."""
        ...

    def part(self, size: int) -> slice:
        """Of such a vector, that is this worker's to step."""
        ...

    def meet(self) -> None:
        """Wait until all have stepped."""
        ...

    def vectors(self, size: int) -> list[Tensor]:
        """That are summed with everyone's: one for each piece of work that may be shared."""
        ...

    def offer(self, count: int) -> None:
        """There are so many pieces to share. All say so, before they begin."""
        ...

    def take(self) -> Iterator[int]:
        """Numbers of pieces that are this worker's to compute, until none is left."""
        ...

    @property
    def pipe(self) -> int:
        """That `take` takes them from, for code in C: 64 bits each."""
        ...
