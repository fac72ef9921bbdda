#!/usr/bin/env python3
"""What the networks in C bring: training passes of one core with both engines, in turns; the shortest count.

python bench/native_network.py [--architecture impala|nature] [--precision float32|bfloat16] [--batch 64] [--rounds 100]
"""

from __future__ import annotations

import argparse
import time

import torch

from rl_cluster_benchmark.config.schema import HardwareConfig, ModelConfig
from rl_cluster_benchmark.kernels.native_network import DTYPES
from rl_cluster_benchmark.nets.models import ActorCritic, make_model

ENGINES = ("native", "torch")


def one_pass(model: ActorCritic, observations: torch.Tensor) -> tuple[float, float]:
    """Microseconds per sample, forward and backward."""
    start = time.perf_counter()
    logits, values = model(observations)
    loss = logits.square().mean() + values.square().mean()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    return (middle - start) / len(observations) * 1e6, (end - middle) / len(observations) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=("impala", "nature"), default="nature", help="default: nature")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="float32", help="default: float32")
    parser.add_argument("--batch", type=int, default=64, help="samples of a pass; default: 64")
    parser.add_argument("--rounds", type=int, default=100, help="passes of each engine; default: 100")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config, shape = ModelConfig(architecture=args.architecture), (64, 64, 3)
    models = {name: make_model(config, shape, 15, HardwareConfig(), DTYPES[args.precision], name) for name in ENGINES}
    if models["native"].native_trunk is None:
        raise SystemExit("The native engine needs a C compiler, and AMX for bfloat16; see rlcb doctor.")
    observations = torch.randint(0, 256, (args.batch, *shape), dtype=torch.uint8)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ENGINES}
    for _ in range(args.rounds):
        for name, model in models.items():
            times[name].append(one_pass(model, observations))
    best = {name: [min(part) for part in zip(*passes, strict=True)] for name, passes in times.items()}
    for name, (forward, backward) in best.items():
        print(f"{name}: forward {forward:.1f}, backward {backward:.1f}, both {forward + backward:.1f} us per sample")
    ratio = sum(best["torch"]) / sum(best["native"])
    print(f"torch over native, {args.architecture}, {args.batch} samples: {ratio:.2f}")


if __name__ == "__main__":
    main()
