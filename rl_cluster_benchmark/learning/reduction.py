"""The interfaces through which an algorithm sees other workers: a sum over all of them, and work shared with some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from rl_cluster_benchmark.kernels.native_network import HiddenRows, NativeTrunk
    from rl_cluster_benchmark.learning.batch import Batch


class OptimizerMemory(NamedTuple):
    """What workers that do not wait for each other let their optimisers change: the parameters, and statistics."""

    parameters: Tensor
    moments: dict[str, Tensor]
    steps: Tensor


class Reducer(Protocol):
    """Sums tensors over all workers (all-reduce)."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over all workers, in place. All must call it, in the same order."""
        ...

    def vector(self, size: int) -> Tensor:
        """Return a float32 vector for the gradient, which `total` sums; it may lie in shared memory, to save a copy."""
        ...

    def total(self, vector: Tensor) -> Tensor:
        """Return the sum of `vector` over all workers.

        It may lie in shared memory: it must not be changed, and is valid only until the next call of this reducer.
        """
        ...

    def running_sum(self, tensor: Tensor) -> Tensor:
        """Return what this worker and all others add to a sum that they keep from update to update."""
        ...

    def optimizer_memory(self) -> OptimizerMemory | None:
        """Return what the optimisers of all workers change without waiting (A3C); None where each has its own."""
        return None


class HiddenLayer(Protocol):
    """Computes the gradient of the hidden layer's weights once per minibatch, from a row that passes write per sample.

    execution/hidden_gradient.py explains it and implements this interface.
    """

    @property
    def rows(self) -> HiddenRows:
        """Return the shared memory for the rows of all samples of a minibatch."""
        ...

    def connect(self, trunk: NativeTrunk, part: slice) -> None:
        """Set the network, and the part of the gradient vector that belongs to the hidden layer's weights."""
        ...

    def begin(self, num_samples: int) -> None:
        """Begin a minibatch of this many samples; the next sum of the gradient vector uses its rows."""
        ...

    def place(self, start: int, count: int) -> None:
        """Let the next pass write its `count` rows from number `start` of the minibatch on."""
        ...


class Sharing(Protocol):
    """One worker's view of the work that workers with access to each other's experience share.

    execution/in_step/work_sharing.py explains it and implements this interface.
    """

    rank: int
    env_ids: Sequence[int]  # of the environments of all workers, in the order of the batch's columns
    owners: Sequence[int]  # for each of these environments, the worker that it belongs to
    fraction: float  # the share of a minibatch that goes to whichever worker is free

    @property
    def hidden(self) -> HiddenLayer | None: ...

    def batch(self, weights: Tensor, advantages: Tensor, returns: Tensor) -> Batch:
        """Publish this worker's weights (1 for experience, 0 for resets) and targets; return all workers' samples."""
        ...

    def parameters(self, size: int) -> Tensor:
        """Return the vector of parameters in shared memory; each worker steps a part of it."""
        ...

    def moments(self, size: int) -> dict[str, Tensor]:
        """Return the vectors of the optimiser's moments in shared memory, by name."""
        ...

    def part(self, size: int) -> slice:
        """Return the part of the parameters and the moments that this worker steps."""
        ...

    def meet(self) -> None:
        """Wait until all workers have stepped their parts."""
        ...

    def vectors(self, size: int) -> list[Tensor]:
        """Return the gradient vectors of shared pieces, one for each; the reducer sums them with the workers' own."""
        ...

    def offer(self, count: int) -> None:
        """Say how many pieces there are to share; all workers must, before they begin."""
        ...

    def take(self) -> Iterator[int]:
        """Yield numbers of pieces for this worker to compute, until none is left."""
        ...

    @property
    def pipe(self) -> int:
        """Return the descriptor of the pipe with the numbers of pieces, 64 bits each, for C code that takes them."""
        ...
