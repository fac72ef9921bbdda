"""Max-pooling in C for channels-last images, several times faster than torch's.

It is checked against torch before it is used; without a compiler, or if anything differs, torch's own is used.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_cluster_benchmark.kernels import build

SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
LANES = 16


def max_pool(images: Tensor) -> Tensor:
    """Return the maxima of 3 x 3 windows with stride 2 and padding 1, computed in C where possible."""
    library = _library()
    suits = (
        library is not None
        and images.dtype in SUFFIXES
        and images.device.type == "cpu"
        and images.shape[1] % LANES == 0
        and images.is_contiguous(memory_format=torch.channels_last)
    )
    if not suits:
        return F.max_pool2d(images, kernel_size=3, stride=2, padding=1)
    return _MaxPool.apply(images)


def available() -> bool:
    return _library() is not None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        pooled, winners = _forward(images, _library())
        ctx.save_for_backward(winners)
        ctx.shape = images.shape
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (winners,) = ctx.saved_tensors
        return _backward(grad, winners, ctx.shape, _library())


def _forward(images: Tensor, library: ctypes.CDLL | None) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = images.shape
    shape = (batch, channels, (height + 1) // 2, (width + 1) // 2)
    pooled = torch.empty(shape, dtype=images.dtype, memory_format=torch.channels_last)
    winners = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
    _call(library, "pool_forward", images, pooled, winners, images.shape)
    return pooled, winners


def _backward(grad: Tensor, winners: Tensor, shape: torch.Size, library: ctypes.CDLL | None) -> Tensor:
    grad = grad.contiguous(memory_format=torch.channels_last)
    grad_images = torch.empty(shape, dtype=grad.dtype, memory_format=torch.channels_last)
    _call(library, "pool_backward", grad, winners, grad_images, shape)
    return grad_images


def _call(
    library: ctypes.CDLL | None, name: str, first: Tensor, second: Tensor, third: Tensor, shape: torch.Size
) -> None:
    batch, channels, height, width = shape
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (first, second, third))
    function = getattr(library, f"{name}_{SUFFIXES[first.dtype]}")
    function(*pointers, batch, height, width, channels, torch.get_num_threads())


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load("pooling.c", ["pooling_body.h"])
    return library if library is not None and _agrees_with_torch(library) else None


def _agrees_with_torch(library: ctypes.CDLL) -> bool:
    """Return whether the C code agrees with torch on images with odd sizes, ties, infinities and NaN.

    Sums of bfloat16 gradients may differ by their rounding.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in SUFFIXES:
        images = torch.randn(3, 32, 7, 10, generator=generator).mul(2).round().div(2)
        images[0, 0, 2, 3], images[1, 1], images[2, 2] = float("nan"), float("-inf"), 0.0
        images = images.to(dtype).contiguous(memory_format=torch.channels_last)
        grad = torch.randn(3, 32, 4, 5, generator=generator).to(dtype)
        grad = grad.contiguous(memory_format=torch.channels_last)
        with torch.inference_mode(False), torch.enable_grad():  # the first pooling may be within inference mode
            theirs = images.clone().requires_grad_()
            expected = F.max_pool2d(theirs, kernel_size=3, stride=2, padding=1)
            (expected * grad).sum().backward()  # backward(grad) would import sympy, which takes half a second
        pooled, winners = _forward(images, library)
        gathered = _backward(grad, winners, images.shape, library)
        assert theirs.grad is not None
        close = torch.allclose(
            gathered.float(), theirs.grad.float(), rtol=0.01, atol=0.01 if dtype != torch.float32 else 1e-6
        )
        if not close or not torch.equal(pooled.nan_to_num(nan=1e3), expected.nan_to_num(nan=1e3)):
            return False
    return True
