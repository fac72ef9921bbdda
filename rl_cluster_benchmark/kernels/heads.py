"""What lies behind the features in a training pass of PPO and A2C, in C: heads.c says what and why.

It is compiled when there is a compiler; whether it computes what the formulas in torch do, tests find out
(tests/test_heads.py): it is plain C, the same for every CPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_cluster_benchmark.kernels import build

MAX_ACTIONS = 256


class Objective(ctypes.Structure):
    """What a sample costs: as in heads.c."""

    _fields_ = (
        ("advantage_mean", ctypes.c_float),
        ("advantage_scale", ctypes.c_float),
        ("num_samples", ctypes.c_float),
        ("clip_range", ctypes.c_float),
        ("clip_values", ctypes.c_int32),
        ("value_coefficient", ctypes.c_float),
        ("entropy_coefficient", ctypes.c_float),
    )


def run(
    policy: nn.Linear, value: nn.Linear, features: Tensor, rows: Tensor, batch: Sequence[Tensor], objective: Objective,
    statistics: Tensor,
) -> Tensor:  # fmt: skip
    """Add to the heads' gradients and to the five statistics; returns the gradient of the features, [B, F].

    `batch` has the actions, their log-probabilities, values, advantages, returns and weights of all samples; those at
    `rows` have these features.
    """
    gradient = torch.empty_like(features)
    weights = (policy.weight, policy.bias, value.weight, value.bias)
    gradients = [weight.grad for weight in weights if weight is not None]
    tensors = (rows, features, *batch, *weights, *gradients, statistics, gradient)
    pointers = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    _function()(*features.shape, len(policy.weight), ctypes.byref(objective), *pointers)
    return gradient


def suit(policy: nn.Linear, device: torch.device) -> bool:
    return device.type == "cpu" and len(policy.weight) <= MAX_ACTIONS and available()


def available() -> bool:
    return _function() is not None


@functools.cache
def _function() -> Any:
    library = build.load("heads.c")
    if library is None:
        return None
    function = library.heads_pass
    function.argtypes = [ctypes.c_long] * 3 + [ctypes.c_void_p] * 19
    function.restype = None
    return function
