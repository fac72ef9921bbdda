"""Random streams: every random number of a run comes from a stream named by (run seed, purpose, indices).

No generator is kept: the draws of environment 7 in rollout 12 depend on (seed, "action", 12, 7) alone. So a run repeats
number for number, a resumed run draws what it would have drawn, and the number of workers changes nothing.
"""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """Return a new generator at the beginning of the stream with this name."""
    return np.random.Generator(np.random.SFC64(_sequence(seed, purpose, index)))


def integer_seed(seed: int, purpose: str, *index: int) -> int:
    """Return a seed of 31 bits, for libraries that take an integer."""
    return int(_sequence(seed, purpose, index).generate_state(1)[0] & 0x7FFFFFFF)


def _sequence(seed: int, purpose: str, index: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *index])
