"""Tensors that end where memory ends, or begin where it begins: whoever reads or writes one byte beyond is killed.

Sanitizers watch memory that malloc gave; this is watched by the CPU, whatever instruction reads it. (A masked load, a
tile of AMX and a library without instrumentation are not seen by AddressSanitizer.)
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS = 0, 1, 2, 2, 0x20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def empty(shape: Sequence[int], dtype: torch.dtype, place: str) -> Tensor:
    """A tensor full of 0xff, NaN in every format, against a page that nobody may touch: before ("begin") or behind it.

    The memory is never given back.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    inside = -(-size // PAGE) * PAGE
    start = _libc.mmap(None, inside + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    assert start not in (None, ctypes.c_void_p(-1).value), "no memory"
    assert _libc.mprotect(start + PAGE, inside, PROT_READ | PROT_WRITE) == 0
    ctypes.memset(start + PAGE, 0xFF, inside)
    first = start + PAGE + (inside - size if place == "end" else 0)
    memory = (ctypes.c_char * size).from_address(first)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(tuple(shape))


def copy(tensor: Tensor, place: str) -> Tensor:
    """The same numbers in guarded memory; weights of convolutions keep their channels-last order."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        return copy(tensor.permute(0, 2, 3, 1), place).permute(0, 3, 1, 2)
    return empty(tensor.shape, tensor.dtype, place).copy_(tensor)


@contextmanager
def allocations(place: str) -> Iterator[None]:
    """Let torch.empty and torch.empty_like give such memory, which is what the code in C writes to."""
    new, like = torch.empty, torch.empty_like

    def guarded(
        *shape: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        sizes = shape[0] if shape and not isinstance(shape[0], int) else shape
        if memory_format == torch.channels_last:
            batch, channels, height, width = sizes  # type: ignore[misc]
            return empty((batch, height, width, channels), dtype, place).permute(0, 3, 1, 2)
        return empty(sizes, dtype, place)  # type: ignore[arg-type]

    torch.empty, torch.empty_like = guarded, lambda tensor: empty(tensor.shape, tensor.dtype, place)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = new, like
