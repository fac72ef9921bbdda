"""A minibatch of PPO or A2C in C, from the observations to the losses and back: heads.c calls the network of network.c.

Between two passes of the network nothing else is left in the cache, and Python takes as long there as several samples
do. So a worker's own samples are one call, and all the pieces of shared work that it gets are another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.network import NO_MEMORY, NativeTrunk, Rows


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
    """Some of these. Each of: a part for each of the model's parameters, in their order; statistics; all that is
    written, in two runs.
    """

    def __init__(self, vectors: Iterable[tuple[Sequence[Tensor], Tensor, Sequence[Tensor]]]) -> None:
        made, self._places = [], []
        for parts, statistics, written in vectors:
            *trunk, policy_weight, policy_bias, value_weight, value_bias = heads.pointers(parts)
            places = (ctypes.c_void_p * len(trunk))(*trunk)
            self._places.append(places)
            runs, sizes = (ctypes.c_void_p * 2)(*heads.pointers(written)), (ctypes.c_long * 2)(*map(len, written))
            head_places = (policy_weight, policy_bias, value_weight, value_bias, statistics.data_ptr())
            made.append(Vector(ctypes.addressof(places), *head_places, runs, sizes))
        self._vectors = (Vector * len(made))(*made)

    def address(self, index: int) -> int:
        return ctypes.addressof(self._vectors[index])


class _Lesson(ctypes.Structure):
    _fields_ = (
        ("heads", heads.Heads),
        ("objective", heads.Objective),
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


class Losses:
    """Of a minibatch, behind any network. `batch`: actions, their log-probabilities, values, advantages, returns and
    weights of all samples.
    """

    def __init__(
        self, policy: nn.Linear, value: nn.Linear, batch: Sequence[Tensor], objective: heads.Objective
    ) -> None:
        self._lesson = _Lesson(heads.Heads.of(policy, value), objective, *heads.pointers(batch))
        self._read = list(batch)  # kept: the code in C has their addresses only

    def __call__(self, features: Tensor, rows: Tensor, vector: int) -> Tensor:
        """Add to the vector's gradients of the heads and statistics; returns the gradient of the features, [B, F]."""
        gradient = torch.empty_like(features)
        self._lesson.rows, self._lesson.to = rows.data_ptr(), vector
        call = heads.library().heads_pass
        call(ctypes.byref(self._lesson), 0, len(features), features.data_ptr(), gradient.data_ptr())
        return gradient


class Lesson(Losses):
    """Of a minibatch, the network included: passes of `most` samples; they leave rows of the hidden layer, or none."""

    def __init__(
        self, trunk: NativeTrunk, observations: Tensor, policy: nn.Linear, value: nn.Linear, batch: Sequence[Tensor],
        objective: heads.Objective, *, most: int, rows: Rows | None,
    ) -> None:  # fmt: skip
        super().__init__(policy, value, batch, objective)
        assert observations.is_contiguous()
        self._read += (observations, *(rows or ()))
        places = (*heads.pointers(rows), rows.inputs.shape[1], rows.slopes.shape[1]) if rows else (None, None, 0, 0)
        self._through, self.seconds = trunk, trunk.seconds
        self._trunk = _Trunk(*trunk.in_c, observations.data_ptr(), most, *places, ctypes.addressof(self.seconds))

    def add(self, rows: NDArray[np.int64], place: int, vector: int) -> None:
        """Of these samples, which have their place in the minibatch."""
        self.run(heads.library().lesson_add, rows.ctypes.data, len(rows), place, vector)

    def take(
        self, rows: NDArray[np.int64], bounds: NDArray[np.int64], place: int, first_vector: int, pipe: int
    ) -> None:
        """Of pieces of these, each with a vector of its own, as long as there are numbers of pieces in the pipe."""
        self.run(heads.library().lesson_take, rows.ctypes.data, bounds.ctypes.data, place, first_vector, pipe)

    def run(self, function: Any, *args: Any) -> int:
        """How many samples it was."""
        self._through.begin_pass()
        samples: int = function(ctypes.byref(self._lesson), ctypes.byref(self._trunk), *args)
        if samples < 0:
            raise MemoryError(NO_MEMORY)
        return samples
