"""The batch of an update, with a row for each sample, and how workers that share work divide its minibatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Rows = list[NDArray[np.int64]]
"""A minibatch as row numbers in the batch: for each worker that shares the batch, the rows of its own environments."""


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


class Division(NamedTuple):
    """A minibatch, divided into rows that each worker keeps and pieces for whichever worker is free."""

    kept: list[int]  # for each worker, how many of its rows it keeps: the first ones
    shared: NDArray[np.int64]  # all other rows
    bounds: tuple[int, ...]  # where the pieces of `shared` begin, and where the last one ends

    @property
    def num_pieces(self) -> int:
        return len(self.bounds) - 1


def divide(rows: Rows, fraction: float, max_pieces: int, smallest: int) -> Division:
    """Divide a minibatch: share this fraction of each worker's rows in pieces of at least `smallest` samples."""
    kept = [len(own) - int(fraction * len(own)) for own in rows]
    rest = np.concatenate([own[count:] for own, count in zip(rows, kept, strict=True)])
    bounds = piece_bounds(len(rest), len(rows), max_pieces, smallest)
    return Division(kept, rest, bounds) if len(bounds) > 1 else Division([len(own) for own in rows], rest[:0], bounds)


@cache
def piece_bounds(count: int, workers: int, max_pieces: int, smallest: int) -> tuple[int, ...]:
    """Return the bounds of pieces: half of the samples split into one piece per worker, half of the rest so, too, etc.

    The scheme is called factoring (Hummel, 1992). Large pieces cost less; small ones at the end let all workers finish
    together, however fast each of them is.
    """
    if count < smallest * workers or max_pieces < workers:
        return (0,)
    while True:
        bounds = [0]
        while (left := count - bounds[-1]) > 0:
            size = max(smallest, -(-left // (2 * workers)))
            bounds += [min(count, bounds[-1] + size * (i + 1)) for i in range(min(workers, -(-left // size)))]
        if len(bounds) - 1 <= max_pieces:
            return tuple(bounds)
        smallest *= 2
