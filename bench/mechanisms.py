#!/usr/bin/env python3
"""What each mechanism brings to one core: the same work with it and without it, in turns; medians.

python bench/mechanisms.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn

from rl_cluster_benchmark.algorithms.ppo import PPO, ppo_losses
from rl_cluster_benchmark.cli.values import positive
from rl_cluster_benchmark.config.schema import Config, HardwareConfig, ModelConfig
from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.kernels.native_network import HiddenRows
from rl_cluster_benchmark.learning.batch import Batch
from rl_cluster_benchmark.learning.learner import Adam, Alone
from rl_cluster_benchmark.learning.losses import Objective, Pass, Samples
from rl_cluster_benchmark.learning.minibatch import Moments
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.nets.models import ActorCritic, make_model

SHAPE, ACTIONS, FEATURES = (64, 64, 3), 15, 256
MEMORY_PASSES, MEMORY_SAMPLES = 5, 512
Case = tuple[str, Callable[[], object], Callable[[], object]]  # what, with it, without it


def build(precision: torch.dtype = torch.bfloat16, engine: str = "torch") -> ActorCritic:
    return make_model(ModelConfig(), SHAPE, ACTIONS, HardwareConfig(), precision, engine)


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8)


def train_on(model: ActorCritic, observations: torch.Tensor) -> None:
    logits, values = model(observations)
    (logits.square().mean() + values.square().mean()).backward()


def cases() -> Iterator[Case]:
    yield from networks()
    yield from_features(64)
    yield from_features(4)
    if heads.available():
        yield from whole_pass(64)
        yield from whole_pass(4)
    size = sum(p.numel() for p in build().parameters())
    flat = Adam(torch.zeros(size), torch.zeros(size), eps=1e-5)
    plain = build()
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    usual = torch.optim.Adam(plain.parameters(), eps=1e-5, foreach=False, fused=False)
    yield "Adam's fused kernel on one flat vector, a step", lambda: flat.step(1e-4), usual.step
    observations, rows = images(4096), torch.randint(0, 4096, (64,))
    yield (
        "observations gathered row by row, 64 of 4,096",
        lambda: observations.index_select(0, rows),
        lambda: observations[rows],
    )


def networks() -> Iterator[Case]:
    observations = images(64)
    half, single = build(), build(torch.float32)
    yield (
        "bfloat16 instead of float32, the IMPALA-CNN in torch, a pass of 64",
        lambda: train_on(half, observations),
        lambda: train_on(single, observations),
    )
    native = build(torch.float32, engine="native")
    if native.native_trunk is None:
        return
    yield (
        "the IMPALA-CNN in C instead of torch, a pass of 64",
        lambda: train_on(native, observations),
        lambda: train_on(half, observations),
    )
    small = observations[:4]
    gradient = torch.zeros(sum(p.numel() for p in native.parameters()))
    rest = gradient[: len(gradient) - native.native_trunk.hidden_weights.numel()]
    rows = HiddenRows(*(torch.zeros(4, n) for n in reversed(native.native_trunk.hidden_weights.shape)))

    def piece(left: HiddenRows | None, cleared: torch.Tensor) -> None:
        assert native.native_trunk is not None
        native.native_trunk.rows = left
        cleared.zero_()
        train_on(native, small)
        native.native_trunk.rows = None

    yield (
        "the hidden layer's gradient left for the reduction, a pass of 4 in C",
        lambda: piece(rows, rest),
        lambda: piece(None, gradient),
    )


def from_features(count: int) -> Case:
    """From features to the losses and back, without the network."""
    model = ActorCritic(nn.Identity(), FEATURES, ACTIONS)
    features = torch.randn(count, FEATURES, requires_grad=True)
    actions, weight = torch.randint(0, ACTIONS, (count,)), torch.full((count,), 1 / count)
    samples = Samples(*torch.randn(4, count))

    def written_out() -> None:
        now = Pass(model, features, actions)
        _, slopes = ppo_losses(now, samples, clip_range=0.2, clip_value_loss=True)
        now.backward(weight * slopes.log_probs, weight * slopes.values, -0.01 * weight)

    def by_autograd() -> None:
        logits, values = model(features)
        log_policy = logits.log_softmax(-1)
        log_probs = log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_policy.exp() * log_policy).sum(-1)
        ratio = (log_probs - samples.log_probs).exp()
        policy = torch.max(-samples.advantages * ratio, -samples.advantages * ratio.clamp(0.8, 1.2))
        clipped = samples.values + (values - samples.values).clamp(-0.2, 0.2)
        value = torch.max((values - samples.returns).square(), (clipped - samples.returns).square())
        (weight @ (policy + 0.5 * value - 0.01 * entropy)).backward()

    return f"PPO's gradient written out instead of autograd, {count} samples", written_out, by_autograd


def whole_pass(count: int) -> Iterator[Case]:
    """With the network, after which nothing else is left in the cache."""
    ppo = PPO(Config(), build(engine="native"), env_ids=range(4), micro_batch=64, reduce=Alone())
    actions, floats = torch.randint(0, ACTIONS, (1024,)), torch.randn(4, 1024)
    batch = Batch(images(1024), torch.ones(1024), actions, *floats)

    if ppo.on_policy.model.native_trunk is None:
        return

    def add(objective: Objective) -> None:
        rows = np.random.default_rng().integers(1024, size=count)
        ppo.on_policy.gradients.passes(batch, Moments(count, 0.0, 1.0), objective).write(rows, 0)

    in_torch = dataclasses.replace(ppo.objective, in_c=None)
    name = f"PPO's heads and losses in C, in one call with the network, {count} samples"
    yield name, partial(add, ppo.objective), partial(add, in_torch)


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def memory_passes(keep: bool) -> float:
    """Milliseconds a pass, in a process of its own: what malloc does is set once."""
    call = [sys.executable, __file__, "--memory", "kept" if keep else "given back"]
    return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def large_passes(keep: bool) -> float:
    if keep:
        process.prepare_process(1)
    model, observations = build(torch.float32), images(MEMORY_SAMPLES)
    train_on(model, observations)
    return median(milliseconds(lambda: train_on(model, observations)) for _ in range(MEMORY_PASSES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=30, help="of each; default: 30")
    parser.add_argument("--memory", choices=("kept", "given back"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        print(large_passes(args.memory == "kept"))
        return
    print(f"{'ms, one core, medians of ' + str(args.rounds):74s} {'without':>8s} {'with':>8s} {'times':>6s}")
    for name, on, off in cases():
        on(), off()
        times = [(milliseconds(on), milliseconds(off)) for _ in range(args.rounds)]
        show(name, *map(median, zip(*times, strict=True)))
    memory = [(memory_passes(True), memory_passes(False)) for _ in range(2)]
    show(f"freed memory kept, a pass of {MEMORY_SAMPLES} in float32", *map(median, zip(*memory, strict=True)))


def show(name: str, on: float, off: float) -> None:
    print(f"{name:74s} {off:8.2f} {on:8.2f} {off / on:6.2f}", flush=True)


if __name__ == "__main__":
    main()
