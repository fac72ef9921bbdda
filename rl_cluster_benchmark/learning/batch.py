"""The batch of an update: its experience as one table with a row for each sample."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """The samples of one worker, or of all workers that share work; row t * N + n is step t of environment n."""

    observations: Tensor  # [T * N, *observation_shape]
    valid: Tensor  # [T * N] 1 for experience, 0 for resets
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
