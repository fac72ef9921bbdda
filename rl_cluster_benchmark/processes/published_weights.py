"""Weights that one process publishes and others read, whole or not at all, with nobody waiting.

There are two copies. A new version goes into the older one, so a reader of the newer is not disturbed unless two
versions come while it reads; its copy's stamp then has changed, and it reads again.
This relies on the order of stores (WRITING, weights, stamp, latest) and of loads (latest, stamp, weights, stamp). x86
keeps both; a large copy that uses its streaming stores, which it does not order, ends with a fence (in glibc's memcpy).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors

WRITING = -1


class PublishedWeights:
    @staticmethod
    def allocate(size: int) -> SharedTensors:
        return SharedTensors(
            {
                "weights": ((2, size), torch.float32),
                "stamps": ((2, CACHE_LINE), torch.int64),  # the version in each copy
                "latest": ((1,), torch.int64),
            }
        )

    def __init__(self, memory: SharedTensors) -> None:
        self._memory = memory  # keeps it mapped
        self._copies = memory["weights"]
        self._stamps, self._latest = memory["stamps"][:, 0].numpy(), memory["latest"].numpy()

    @property
    def version(self) -> int:
        return int(self._latest[0])

    def publish(self, weights: Tensor) -> int:
        """By one process only; returns the new version. The first is 1."""
        version = self.version + 1
        place = version % 2
        self._stamps[place] = WRITING
        self._copies[place].copy_(weights)
        self._stamps[place] = version
        self._latest[0] = version
        return version

    def read(self, weights: Tensor) -> int:
        """Copy the newest weights into `weights`; returns their version."""
        while True:
            version = self.version
            place = version % 2
            if self._stamps[place] == version:
                weights.copy_(self._copies[place])
                if self._stamps[place] == version:
                    return version
