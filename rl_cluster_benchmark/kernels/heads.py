"""The policy and value heads in C (source/heads.h): choosing actions here, training in minibatch_pass.py.

They are not compared with torch at run time as the networks are: tests/unit/kernels/test_heads.py does that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rl_cluster_benchmark.kernels import build

MAX_ACTIONS = 256
Choice = tuple[NDArray[Any], ...]
"""Chosen actions, their log-probabilities and the values of the observations, [N] each."""


class Heads(ctypes.Structure):
    """The sizes of the two heads and the addresses of their weights: `Heads` in heads.h."""

    _fields_ = (
        ("width", ctypes.c_long),
        ("num_actions", ctypes.c_long),
        ("policy_weight", ctypes.c_void_p),
        ("policy_bias", ctypes.c_void_p),
        ("value_weight", ctypes.c_void_p),
        ("value_bias", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, policy: nn.Linear, value: nn.Linear) -> Heads:
        weights = (policy.weight, policy.bias, value.weight, value.bias)
        return cls(policy.in_features, policy.out_features, *pointers(weights))


class ObjectiveInC(ctypes.Structure):
    """The coefficients of the losses of PPO or A2C: `Objective` in heads.h."""

    _fields_ = (
        ("advantage_mean", ctypes.c_float),
        ("advantage_scale", ctypes.c_float),
        ("num_samples", ctypes.c_float),
        ("clip_range", ctypes.c_float),
        ("clip_values", ctypes.c_int32),
        ("value_coefficient", ctypes.c_float),
        ("entropy_coefficient", ctypes.c_float),
    )


class Acting:
    """Chooses the actions of a rollout step by step, with Gumbel noise [T, N, A]."""

    def __init__(self, policy: nn.Linear, value: nn.Linear, noise: Tensor) -> None:
        self._heads, self._noise = Heads.of(policy, value), noise.contiguous()
        _, num_envs, num_actions = noise.shape
        self._noise_step = num_envs * num_actions * noise.element_size()
        chosen = torch.empty(num_envs, dtype=torch.int64), torch.empty(num_envs), torch.empty(num_envs)
        self._pointers, self._chosen = pointers(chosen), tuple(tensor.numpy() for tensor in chosen)

    def __call__(self, t: int, features: Tensor) -> Choice:
        """Return the choice for step t from the features [N, F]; the next call overwrites the returned arrays."""
        features = features.contiguous()
        noise = self._noise.data_ptr() + t * self._noise_step
        compiled().heads_act(ctypes.byref(self._heads), len(features), features.data_ptr(), noise, *self._pointers)
        return self._chosen


def suit(policy: nn.Linear, device: torch.device) -> bool:
    """Return whether the heads of a model can be computed in C."""
    return device.type == "cpu" and policy.out_features <= MAX_ACTIONS and available()


def available() -> bool:
    return _load() is not None


def compiled() -> ctypes.CDLL:
    library = _load()
    assert library is not None
    return library


@functools.cache
def _load() -> ctypes.CDLL | None:
    loaded = build.load("float32") or build.load("bfloat16")  # they are the same in both
    if loaded is None:
        return None
    library, pointer, number = loaded.code, ctypes.c_void_p, ctypes.c_long
    library.heads_act.argtypes = [pointer, number, *[pointer] * 5]
    library.heads_act.restype = None
    library.minibatch_add.argtypes = [pointer, pointer, pointer, number, number, pointer, ctypes.c_int]
    library.minibatch_take.argtypes = [pointer, pointer, pointer, pointer, number, pointer, ctypes.c_int]
    library.minibatch_add.restype = library.minibatch_take.restype = number
    return library


def pointers(tensors: Sequence[Tensor | None]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]
