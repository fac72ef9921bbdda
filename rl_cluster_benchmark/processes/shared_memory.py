"""Shared memory for the processes of one run, which no run can leave behind.

It is a memfd: it has no name in any filesystem, so it is freed with the last process that holds it, however that
process ends, and the size of /dev/shm does not limit it.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing.context
import multiprocessing.reduction
import os
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.core.errors import UserError

ALIGNMENT = 4096
CACHE_LINE = 8  # 8-byte numbers in a cache line: rows of this length, written by different processes, share none

MemoryLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class SharedTensors(dict[str, Tensor]):
    """Named tensors in one piece of shared memory; passed to a worker process, they are the same memory there."""

    def __init__(self, layout: MemoryLayout, received: Any = None) -> None:
        """Make the memory, or map what another process has made, whose descriptor was `received` from it."""
        super().__init__()
        self._layout = layout
        self._fd = _new_memory(layout) if received is None else received.detach()
        memory, offset = mmap.mmap(self._fd, 0), 0
        for name, (shape, dtype) in layout.items():
            count = math.prod(shape)
            self[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
            offset += _size(shape, dtype)

    def close(self) -> None:
        """Release this process's hold on the memory; tensors taken from it keep it mapped until they are gone."""
        self.clear()
        os.close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedTensors, (self._layout, multiprocessing.reduction.DupFd(self._fd))


def _new_memory(layout: MemoryLayout) -> int:
    """Return the descriptor of new memory for tensors of this layout."""
    fd = os.memfd_create("rl_cluster_benchmark", os.MFD_CLOEXEC)
    size = sum(_size(shape, dtype) for shape, dtype in layout.values())
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        raise UserError(
            f"{size / 2**20:,.1f} MiB of shared memory cannot be had ({error.strerror}); a limit of the size of "
            "files (ulimit -f) holds for it, too."
        ) from None
    return fd


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return a tensor's size in bytes, rounded up so that the next tensor starts on a page of its own."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
