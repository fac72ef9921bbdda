"""The experience of an update as one table, a row for each sample."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """Samples, flattened: row t * N + n is step t of environment n, of one worker or of all that share work."""

    observations: Tensor  # [T * N, *observation_shape]
    valid: Tensor  # [T * N] 1 for experience, 0 for resets
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
