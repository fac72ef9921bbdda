"""A minibatch of PPO or A2C in C, from the observations to the losses and back.

heads.h calls the network. A worker's own samples are one call, and all the pieces of shared
work that it gets are another: between two passes of the network, which push everything else out of the cache, Python
code takes as long as several samples.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.native_network import NO_MEMORY, HiddenRows, NativeTrunk

MOST_IN_A_CALL = 512  # samples, a multiple of 32 (BLOCK in network.h); Python handles a signal only after the call


class Vector(ctypes.Structure):
    """The addresses that passes add gradients and statistics to: `Vector` in heads.h."""

    _fields_ = (
        ("trunk", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("policy_weight", "policy_bias", "value_weight", "value_bias")),
        ("statistics", ctypes.c_void_p),
        ("written", ctypes.c_void_p * 2),
        ("sizes", ctypes.c_long * 2),
    )


class Vectors:
    """The gradient vectors of a learner as an array that the C code can read."""

    def __init__(self, vectors: Iterable[tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]]) -> None:
        """Take for each vector the gradients of the model's parameters in order, the statistics, and memory to clear.

        That memory is everything that passes write to, as two contiguous tensors.
        """
        made, self._layers = [], []
        for parts, statistics, written in vectors:
            *trunk, policy_weight, policy_bias, value_weight, value_bias = heads.pointers(parts)
            layers = (ctypes.c_void_p * len(trunk))(*trunk)  # weights and bias of each layer
            self._layers.append(layers)
            runs, sizes = (ctypes.c_void_p * 2)(*heads.pointers(written)), (ctypes.c_long * 2)(*map(len, written))
            of_heads = (policy_weight, policy_bias, value_weight, value_bias, statistics.data_ptr())
            made.append(Vector(ctypes.addressof(layers), *of_heads, runs, sizes))
        self._vectors = (Vector * len(made))(*made)

    def address(self, index: int) -> int:
        return ctypes.addressof(self._vectors[index])


class _Minibatch(ctypes.Structure):
    _fields_ = (
        ("heads", heads.Heads),
        ("objective", heads.ObjectiveInC),
        *((name, ctypes.c_void_p) for name in ("actions", "log_probs", "values", "advantages", "returns", "valid")),
    )


class _Trunk(ctypes.Structure):
    _fields_ = (
        ("network", ctypes.c_void_p),
        ("train", ctypes.c_void_p),
        ("threads", ctypes.c_int),
        ("observations", ctypes.c_void_p),
        ("row_inputs", ctypes.c_void_p),
        ("row_slopes", ctypes.c_void_p),
        ("input_bytes", ctypes.c_long),
        ("slope_bytes", ctypes.c_long),
        ("seconds", ctypes.c_void_p),
    )


class MinibatchInC:
    """Computes gradients of a minibatch, network, heads and losses, in C."""

    def __init__(
        self, trunk: NativeTrunk, observations: Tensor, of_heads: heads.Heads, objective: heads.ObjectiveInC,
        targets: Sequence[Tensor], *, rows: HiddenRows | None,
    ) -> None:  # fmt: skip
        """Prepare a minibatch whose samples are rows of this batch.

        `targets` are the actions, log-probabilities, values, advantages, returns and weights of all samples of the
        batch. A pass writes a row for each sample to the hidden layer's `rows`, or, where that is None, adds to the
        gradient of the hidden layer's weights.
        """
        assert observations.is_contiguous()
        places = (*heads.pointers(rows), *(part[0].nbytes for part in rows)) if rows else (None, None, 0, 0)
        self.seconds = trunk.seconds
        self._network, self._kept = trunk, (observations, rows, targets)  # the code in C has their addresses only
        self._minibatch = _Minibatch(of_heads, objective, *heads.pointers(targets))
        network, places = (*trunk.entry_points, torch.get_num_threads()), (observations.data_ptr(), *places)
        self._trunk = _Trunk(*network, *places, ctypes.addressof(self.seconds))

    def write(self, rows: NDArray[np.int64], place: int, vector: int) -> None:
        """Write the gradient of the samples in these rows to the vector at address `vector`; of no samples, zeros.

        `place` is the number of the first of them within the minibatch.
        """
        for start in range(0, max(1, len(rows)), MOST_IN_A_CALL):
            some = rows[start : start + MOST_IN_A_CALL]
            arguments = (some.ctypes.data, len(some), place + start, vector, start == 0)
            self.call(heads.compiled().minibatch_add, *arguments)

    def take(
        self, rows: NDArray[np.int64], bounds: NDArray[np.int64], place: int, first_vector: int, pipe: int
    ) -> None:
        """Take numbers of pieces from the pipe until it is empty, and write each piece's gradient to its own vector.

        Piece i is `rows[bounds[i]:bounds[i + 1]]`; its vector is number i from the address `first_vector` on.
        """
        arguments = (rows.ctypes.data, bounds.ctypes.data, place, first_vector, pipe)
        self.call(heads.compiled().minibatch_take, *arguments)

    def call(self, function: Any, *args: Any) -> int:
        """Call a C function that makes training passes; return the number of samples."""
        self._network.begin_pass()
        samples: int = function(ctypes.byref(self._minibatch), ctypes.byref(self._trunk), *args)
        if samples < 0:
            raise MemoryError(NO_MEMORY)
        return samples
