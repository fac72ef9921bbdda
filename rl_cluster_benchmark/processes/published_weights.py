"""Weights that one process publishes and others read: every read gets one whole version, and nobody waits.

There are two copies. A new version overwrites the older copy, so a process that reads the newer one is not disturbed
unless two versions are published meanwhile; it then finds another stamp on its copy, and reads again.
This relies on the order of stores (WRITING, weights, stamp, latest) and of loads (latest, stamp, weights, stamp). x86
keeps both, except for streaming stores, which large copies may use; glibc's memcpy ends these with a fence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_cluster_benchmark.processes.shared_memory import CACHE_LINE, SharedTensors

WRITING = -1  # stamp of a copy that is being written


class PublishedWeights:
    """One process's access to the published weights."""

    @staticmethod
    def allocate(size: int) -> SharedTensors:
        return SharedTensors(
            {
                "weights": ((2, size), torch.float32),
                "stamps": ((2, CACHE_LINE), torch.int64),  # the version of each copy
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
        """Publish weights and return their version, 1 for the first. Only one process may call this."""
        version = self.version + 1
        place = version % 2
        self._stamps[place] = WRITING
        self._copies[place].copy_(weights)
        self._stamps[place] = version
        self._latest[0] = version
        return version

    def read(self, weights: Tensor) -> int:
        """Copy the newest weights into `weights` and return their version."""
        while True:
            version = self.version
            place = version % 2
            if self._stamps[place] == version:
                weights.copy_(self._copies[place])
                if self._stamps[place] == version:
                    return version
