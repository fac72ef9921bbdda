"""Timers for the parts of a pass in a profiled process: forward, backward, the C code, the environments.

They wrap functions of this package, in that process alone; a run that is not profiled has none. torch's profiler
cannot look into C code and EnvPool: while it records, each timed call is a row of its own in its table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rl_cluster_benchmark.env import environments
from rl_cluster_benchmark.kernels import minibatch_pass, native_network
from rl_cluster_benchmark.nets.models import ActorCritic
from rl_cluster_benchmark.profiling.stages import BACKWARD, FORWARD, INFERENCE

PACKING = "native network: transforming the weights"
LOSSES, WHOLE_PASS = "C heads and losses", "native network: forward, losses and backward"
# (class or module, function, name of its row in the report)
IN_C = (
    (native_network.NativeTrunk, "forward", "native network: forward"),
    (native_network.NativeTrunk, "backward", "native network: backward"),
    (native_network.NativeTrunk, "_pack", PACKING),
    (minibatch_pass.MinibatchInC, "call", WHOLE_PASS),
    (environments.EnvPoolEnv, "step", "EnvPool: step"),
)


class Passes:
    """Counts seconds, calls and samples of the passes and C functions that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.samples = dict.fromkeys((INFERENCE, FORWARD, BACKWARD), 0)
        self.recording = False  # whether torch's profiler records now

    def install(self) -> None:
        for place, function, name in IN_C:
            setattr(place, function, self._timed(name, getattr(place, function)))
        ActorCritic.features = self._counted_inference(ActorCritic.features)  # type: ignore[method-assign]
        ActorCritic.pass_through = self._counted_pass(ActorCritic.pass_through)  # type: ignore[method-assign]
        minibatch_pass.MinibatchInC.call = self._counted_call(minibatch_pass.MinibatchInC.call)  # type: ignore[method-assign]

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

    def _counted_inference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def features(model: ActorCritic, observations: torch.Tensor) -> Any:
            if torch.is_grad_enabled():  # part of a training pass, which _counted_pass counts
                return function(model, observations)
            return self._counted(INFERENCE, len(observations), function, model, observations)

        return features

    def _counted_pass(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def pass_through(model: ActorCritic, observations: torch.Tensor, rows: torch.Tensor | None = None) -> Any:
            count = len(observations if rows is None else rows)
            features, back = self._counted(FORWARD, count, function, model, observations, rows)
            return features, partial(self._counted, BACKWARD, count, back)

        return pass_through

    def _counted_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count training passes that are one call of C code, from the seconds that it reports for their parts.

        Packing the weights counts as a part of the forward pass.
        """

        def call(of: minibatch_pass.MinibatchInC, *args: Any) -> int:
            before, packed = list(of.seconds), self.seconds.get(PACKING, 0.0)
            samples: int = function(of, *args)
            forward, losses, backward = (after - earlier for earlier, after in zip(before, of.seconds, strict=True))
            forward += self.seconds.get(PACKING, 0.0) - packed
            for kind, seconds in ((FORWARD, forward), (LOSSES, losses), (BACKWARD, backward)):
                self._add(kind, seconds)
            for kind in (FORWARD, BACKWARD):
                self.samples[kind] += samples
            return samples

        return call

    def _counted(self, kind: str, samples: int, function: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = function(*args)
        self._add(kind, time.perf_counter() - started)
        self.samples[kind] += samples
        return result

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.calls[name] = self.calls.get(name, 0) + 1
