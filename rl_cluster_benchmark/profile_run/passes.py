"""How long the parts of a pass take in a process that is profiled: forward, backward, the C code, the environments.

Timers are laid around this package's own functions, in that process alone; a run that is not profiled has none.
torch's profiler cannot look into C code and EnvPool: while it records, each timed call is a row of its own there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from rl_cluster_benchmark import envs
from rl_cluster_benchmark.kernels import network, pooling
from rl_cluster_benchmark.models import ActorCritic
from rl_cluster_benchmark.profile_run.attach import BACKWARD, FORWARD, INFERENCE

# (where, function, the name of its row)
IN_C = (
    (network.NativeTrunk, "forward", "native network: forward"),
    (network.NativeTrunk, "backward", "native network: backward"),
    (network.NativeTrunk, "_pack", "native network: weights to bfloat16"),
    (pooling, "_forward", "C max-pooling: forward"),
    (pooling, "_backward", "C max-pooling: backward"),
    (envs.EnvPoolEnv, "step", "EnvPool: step"),
)


class Passes:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.samples = dict.fromkeys((INFERENCE, FORWARD, BACKWARD), 0)
        self.recording = False  # by torch's profiler
        self._last_samples = 0

    def install(self) -> None:
        for place, function, name in IN_C:
            setattr(place, function, self._timed(name, getattr(place, function)))
        ActorCritic.features = self._counted_forward(ActorCritic.features)  # type: ignore[method-assign]
        torch.Tensor.backward = self._counted_backward(torch.Tensor.backward)  # type: ignore[method-assign]

    def state(self) -> dict[str, dict[str, float]]:
        return {"seconds": dict(self.seconds), "calls": dict(self.calls), "samples": dict(self.samples)}

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.recording:
                with torch.profiler.record_function(name):
                    return function(*args, **kwargs)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._add(name, time.perf_counter() - started)

        return timed

    def _counted_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(model: ActorCritic, observations: torch.Tensor) -> Any:
            kind = FORWARD if torch.is_grad_enabled() else INFERENCE
            started = time.perf_counter()
            result = function(model, observations)
            self._add(kind, time.perf_counter() - started)
            self.samples[kind] += len(observations)
            if kind == FORWARD:
                self._last_samples = len(observations)
            return result

        return forward

    def _counted_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self._add(BACKWARD, time.perf_counter() - started)
            self.samples[BACKWARD] += self._last_samples
            return result

        return backward

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] = self.calls.get(name, 0) + 1
