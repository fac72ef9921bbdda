"""A minibatch of PPO or A2C in C, from the observations to the losses and back: heads.c calls the network of network.c.

Between two passes of the network nothing else is left in the cache, and Python takes as long there as several samples
do. So a worker's own samples are one call, and all the pieces of shared work that it gets are another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.native_network import NO_MEMORY, HiddenRows, NativeTrunk

MOST_IN_A_CALL = 512  # samples: a signal waits for its end


class Vector(ctypes.Structure):
    """Where passes add to: as in heads.c."""

    _fields_ = (
        ("trunk", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("policy_weight", "policy_bias", "value_weight", "value_bias")),
        ("statistics", ctypes.c_void_p),
        ("written", ctypes.c_void_p * 2),
        ("sizes", ctypes.c_long * 2),
    )


class Vectors:
    """Gradient vectors for the code in C."""

    def __init__(self, vectors: Iterable[tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]]) -> None:
        """Of each: the parts of the model's parameters, in their order; the statistics; everything, in two runs."""
        made, self._layers = [], []
        for parts, statistics, written in vectors:
            *trunk, policy_weight, policy_bias, value_weight, value_bias = heads.pointers(parts)
            layers = (ctypes.c_void_p * len(trunk))(*trunk)  # weights and bias of each
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
        ("rows", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
    )


class _Trunk(ctypes.Structure):
    _fields_ = (
        ("network", ctypes.c_void_p),
        ("train", ctypes.c_void_p),
        ("observations", ctypes.c_void_p),
        ("most", ctypes.c_long),
        ("row_inputs", ctypes.c_void_p),
        ("row_slopes", ctypes.c_void_p),
        ("features", ctypes.c_long),
        ("width", ctypes.c_long),
        ("seconds", ctypes.c_void_p),
    )


class MinibatchInC:
    """A minibatch whose network, heads and losses are computed in C."""

    def __init__(
        self, trunk: NativeTrunk, observations: Tensor, of_heads: heads.Heads, objective: heads.ObjectiveInC,
        targets: Sequence[Tensor], *, most: int, rows: HiddenRows | None,
    ) -> None:  # fmt: skip
        """`targets` are the actions, their log-probabilities, values, advantages, returns and weights of all samples.

        Passes are of `most` samples; they leave `rows` of the hidden layer, or add to its gradient.
        """
        assert observations.is_contiguous()
        places = (*heads.pointers(rows), rows.inputs.shape[1], rows.slopes.shape[1]) if rows else (None, None, 0, 0)
        self.seconds = trunk.seconds
        self._network, self._kept = trunk, (observations, rows, targets)  # the code in C has their addresses only
        self._minibatch = _Minibatch(of_heads, objective, *heads.pointers(targets))
        addresses = (*trunk.entry_points, observations.data_ptr(), most, *places, ctypes.addressof(self.seconds))
        self._trunk = _Trunk(*addresses)

    def write(self, rows: NDArray[np.int64], place: int, vector: int) -> None:
        """Write the gradient of these samples, whose first is number `place` of the minibatch; of none, zeros."""
        for start in range(0, max(1, len(rows)), MOST_IN_A_CALL):
            some = rows[start : start + MOST_IN_A_CALL]
            arguments = (some.ctypes.data, len(some), place + start, vector, start == 0)
            self.call(heads.compiled().minibatch_add, *arguments)

    def take(
        self, rows: NDArray[np.int64], bounds: NDArray[np.int64], place: int, first_vector: int, pipe: int
    ) -> None:
        """Write the gradients of pieces of these rows, until the pipe has no number of a piece any more."""
        arguments = (rows.ctypes.data, bounds.ctypes.data, place, first_vector, pipe)
        self.call(heads.compiled().minibatch_take, *arguments)

    def call(self, function: Any, *args: Any) -> int:
        """Call a function in C that makes passes; return the number of their samples."""
        self._network.begin_pass()
        samples: int = function(ctypes.byref(self._minibatch), ctypes.byref(self._trunk), *args)
        if samples < 0:
            raise MemoryError(NO_MEMORY)
        return samples
