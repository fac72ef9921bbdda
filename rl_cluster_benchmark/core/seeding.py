"""Every random number of a run comes from a stream named by (run seed, purpose, where it is used).

No generator lives on: what env 7 draws in rollout 12 depends on nothing but those numbers. So a run repeats number for
number, a resumed run goes on with the stream it would have had, and the split over workers changes nothing.
"""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str, *index: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(_sequence(seed, purpose, index)))


def integer_seed(seed: int, purpose: str, *index: int) -> int:
    """A seed for a library that takes a 31-bit integer."""
    return int(_sequence(seed, purpose, index).generate_state(1)[0] & 0x7FFFFFFF)


def _sequence(seed: int, purpose: str, index: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *index])
