"""Unrolls kept to be learned from again, in a memory-mapped file: there may be more of them than memory.

The file lies in the run's directory but has no name there: it is gone with the process. Its space is claimed at the
start, when it is known how much that will be. Each learner keeps and replays the unrolls that it has learned from.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.execution.actor_learner.unrolls import Fields, UnrollLayout


class ReplayFile:
    def __init__(self, folder: Path, capacity: int, layout: UnrollLayout) -> None:
        self.capacity, self.added = capacity, 0
        size = capacity * sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise UserError(
                    f"The replay of {capacity:,} unrolls takes {size / 2**30:.1f} GiB in {folder} "
                    f"({error.strerror}); use a smaller impala.replay_size or another --output-dir."
                ) from None
            self._map = mmap.mmap(file.fileno(), size)
        with contextlib.suppress(OSError):  # only a hint to the kernel
            self._map.madvise(mmap.MADV_RANDOM)
        self._fields: dict[str, Tensor] = {}
        offset = 0
        for name, (shape, dtype) in layout.items():
            count = capacity * math.prod(shape)
            self._fields[name] = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(
                capacity, *shape
            )
            offset += count * dtype.itemsize

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, fields: Fields, row: int) -> None:
        """Keep an unroll; the oldest makes room for it when the file is full."""
        place = self.added % self.capacity
        for name, kept in self._fields.items():
            kept[place].copy_(fields[name][row])
        self.added += 1

    def sample(self, count: int, generator: np.random.Generator) -> list[tuple[dict[str, Tensor], int]]:
        """Draw unrolls evenly, and read them into memory here, so that no pass of the network waits for the disk."""
        rows = torch.from_numpy(generator.integers(len(self), size=count))
        drawn = {name: kept[rows] for name, kept in self._fields.items()}
        return [(drawn, i) for i in range(count)]
