"""The gradient of the hidden layer's weights, made once for a minibatch instead of in every pass.

These are five sixths of the IMPALA-CNN's parameters, and to add to their gradient takes a small pass as long as several
samples do. But that gradient is a product of two narrow matrices with a row for each sample: what went into the layer,
and the slopes of the loss at its outputs. So the passes only leave these rows in shared memory, and in the reduction
every worker multiplies its share of the columns, for all samples at once.
"""

from __future__ import annotations

from torch import Tensor

from rl_cluster_benchmark.kernels.native_network import DTYPES, LANES, HiddenRows, NativeTrunk, padded
from rl_cluster_benchmark.processes.shared_memory import SharedTensors

MAX_BYTES = 128 * 2**20  # for the rows of a minibatch; larger ones have large passes


def allocate(hidden_shape: tuple[int, int], num_samples: int, precision: str) -> SharedTensors | None:
    """Make the memory for a minibatch's rows; return None if it would be too much."""
    width, features = hidden_shape
    count, dtype = padded(num_samples), DTYPES[precision]
    if dtype.itemsize * count * (width + features) > MAX_BYTES:
        return None
    return SharedTensors({"inputs": ((count, features), dtype), "slopes": ((count, width), dtype)})


class HiddenGradient:
    """One worker's part in making the gradient."""

    def __init__(self, memory: SharedTensors, rank: int, num_workers: int) -> None:
        self.rows, self._rank = HiddenRows(memory["inputs"], memory["slopes"]), rank
        blocks = self.rows.inputs.shape[1] // LANES
        first, last = (LANES * (blocks * i // num_workers) for i in (rank, rank + 1))
        self._columns = range(first, last)
        self._samples: int | None = None  # of the minibatch at hand; 0 where this machine has none of it
        self.part = slice(0, 0)  # of the gradient vector

    def connect(self, trunk: NativeTrunk, part: slice) -> None:
        """Say where in the vector of the trunk's gradient that of these weights is."""
        self._trunk, self.part = trunk, part

    @property
    def is_due(self) -> bool:
        """Return whether the next sum is that of a minibatch."""
        return self._samples is not None

    def begin(self, num_samples: int) -> None:
        """Begin a minibatch: nobody reads the rows of the last one any more."""
        assert num_samples <= len(self.rows.inputs)
        self._samples = num_samples
        if self._rank == 0:
            for rows in self.rows:
                rows[num_samples : padded(num_samples)].zero_()

    def place(self, start: int, count: int) -> None:
        """Say where in the minibatch the samples of the next pass are."""
        self._trunk.rows = HiddenRows(*(rows[start : start + count] for rows in self.rows))

    def write(self, gradient: Tensor) -> None:
        """Compute this worker's columns of the gradient, once everyone's rows are there."""
        assert self._samples is not None
        self._trunk.multiply(self.rows, self._samples, self._columns, gradient[self.part])
        self._samples = self._trunk.rows = None
