"""What an algorithm sees of the other workers: a sum over all of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Reducer(Protocol):
    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum the tensor over all workers, in place. All must call it, in the same order."""
        ...

    def vector(self, size: int) -> Tensor:
        """A float32 vector for what is summed most: it may lie where the others can read it."""
        ...


class Alone:
    """One worker: nothing to add."""

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor

    def vector(self, size: int) -> Tensor:
        return torch.zeros(size)


def anyone(reduce: Reducer, here: bool) -> bool:
    """Is it so on any worker? All get the same answer."""
    return bool(reduce(torch.tensor([float(here)], dtype=torch.float64)) > 0)
