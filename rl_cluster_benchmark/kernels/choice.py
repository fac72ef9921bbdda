"""Which precision the C code computes a network in: where several are possible, the faster one, which is measured.

bfloat16 has the faster products on CPUs with AMX, float32 the algorithm that needs fewer of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch

from rl_cluster_benchmark.kernels import build
from rl_cluster_benchmark.kernels.native_network import SOURCES, NativeTrunk, make_trunk, random_parameters

SIDE = 64  # of the games' images
SAMPLES = 32  # of a training pass
SECONDS, FEWEST = 0.3, 4  # of the passes, and turns of them at least
MARGIN = 1.05  # bfloat16 is less exact: it has to be faster by this


class Choice(NamedTuple):
    precision: str
    variant: str
    reason: str  # "" where nothing else was possible


@cache
def choose(
    architecture: str, channels: tuple[int, ...], hidden_size: int, precisions: tuple[str, ...]
) -> Choice | None:
    """Return what computes this network for 64 x 64 images; None if there is no C code for it in these precisions."""
    source, generator, shape = SOURCES[architecture], torch.Generator().manual_seed(0), (SIDE, SIDE, 3)
    if architecture == "nature":
        channels = source.check_channels  # it has no others
    parameters = random_parameters(source.shapes(SIDE, channels, hidden_size), generator)
    made = {each: make_trunk(architecture, shape, channels, parameters, each) for each in precisions}
    trunks = {precision: trunk for precision, trunk in made.items() if trunk is not None}
    names = {each: library.variant.name for each in trunks if (library := build.load(each)) is not None}
    if len(trunks) < 2:
        return next((Choice(precision, names[precision], "") for precision in trunks), None)
    seconds = seconds_of_passes(trunks)
    speedup = seconds["float32"] / seconds["bfloat16"]
    faster = "bfloat16" if speedup > MARGIN else "float32"
    found = f"measured: {names['bfloat16']} is {speedup:.2f} times as fast as {names['float32']}"
    return Choice(faster, names[faster], found)


def seconds_of_passes(trunks: Mapping[str, NativeTrunk]) -> dict[str, float]:
    """Return the seconds of a training pass of each network in one thread: the least of several, made in turns."""
    generator, threads = torch.Generator().manual_seed(1), torch.get_num_threads()
    observations = torch.randint(0, 256, (SAMPLES, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)
    least = dict.fromkeys(trunks, float("inf"))
    torch.set_num_threads(1)
    turns, end = 0, time.perf_counter() + SECONDS
    while turns < FEWEST or time.perf_counter() < end:
        for name, trunk in trunks.items():
            start = time.perf_counter()
            features, back = trunk.pass_through(observations)
            back(features)
            least[name] = min(least[name], time.perf_counter() - start)
        turns += 1
    torch.set_num_threads(threads)
    return least
