#!/usr/bin/env python3
"""Would actors gain from int8? The IMPALA-CNN's forward pass in float32, bfloat16 and torch's int8, with one thread.

python bench/int8_inference.py [--rounds 5] [--batch 16]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.machine.process import prepare_process
from rl_cluster_benchmark.nets.models import ConvStage, ImpalaCNN, ResidualBlock, make_model


class PlainBlock(nn.Module):
    """A residual block of modules that torch can quantise: nothing in place, no kernel of ours."""

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(), block.conv0, nn.ReLU(), block.conv1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


def plain(trunk: ImpalaCNN) -> nn.Module:
    stages: list[nn.Module] = []
    for stage in trunk.stages:
        assert isinstance(stage, ConvStage)
        stages += [stage.conv, nn.MaxPool2d(3, 2, 1), PlainBlock(stage.block0), PlainBlock(stage.block1)]
    return nn.Sequential(*stages, nn.ReLU(), nn.Flatten(), trunk.hidden, nn.ReLU())


def quantised(trunk: ImpalaCNN, images: Tensor) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    prepared = prepare_fx(plain(trunk).eval(), get_default_qconfig_mapping("x86"), (images,))
    prepared(images)
    return convert_fx(prepared)


def milliseconds(forward: Callable[[], object], seconds: float = 0.5) -> float:
    forward()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        forward()
        calls += 1
    return 1e3 * (time.perf_counter() - start) / calls


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--batch", type=int, default=16, help="environments of an actor; default: 16")
    args = parser.parse_args()
    prepare_process(1)
    warnings.simplefilter("ignore")
    config = Config()
    frames = torch.randint(255, (args.batch, 64, 64, 3), dtype=torch.uint8)
    single, half = (
        make_model(config.model, (64, 64, 3), 15, config.hardware, precision)
        for precision in (torch.float32, torch.bfloat16)
    )

    def scaled() -> Tensor:
        return frames.permute(0, 3, 1, 2).float().div_(255)

    assert isinstance(single.trunk, ImpalaCNN)
    whole = quantised(single.trunk, scaled())
    forwards: dict[str, Callable[[], object]] = {
        "float32": lambda: single(frames),
        "bfloat16": lambda: half(frames),
        "int8": lambda: whole(scaled()),
    }
    best = dict.fromkeys(forwards, float("inf"))
    for _ in range(args.rounds):
        for name, forward in forwards.items():
            best[name] = min(best[name], milliseconds(forward))
    for name, time_taken in best.items():
        print(f"{name:<9} {time_taken / args.batch:.3f} ms a frame, {best['float32'] / time_taken:.2f} x float32")


if __name__ == "__main__":
    main()
