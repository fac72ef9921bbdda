"""The algorithms as configs, plans and tools see them: names, and how their processes work together, but no maths.

algorithms/registry.py adds the classes that learn.
"""

from __future__ import annotations

from dataclasses import dataclass


def is_sequential(mode: object) -> bool:
    """Return whether in this mode one process does everything."""
    return mode == "sequential"


def is_parallel(mode: object) -> bool:
    """Return whether in this mode there are workers on one machine."""
    return mode == "parallel"


def is_distributed(mode: object) -> bool:
    """Return whether in this mode there are workers on machines that meet."""
    return mode == "distributed"


@dataclass(frozen=True)
class Traits:
    """Properties of an algorithm that do not concern its maths."""

    name: str  # in configs and on the command line
    label: str  # in texts
    synchronisations: tuple[str, ...]  # the values of cluster.sync that it can be run with
    has_minibatches: bool = False  # whether it learns from a rollout in epochs of minibatches
    has_actors: bool = False  # whether, outside sequential mode, some processes act and others learn from unrolls
    is_lock_free: bool = False  # whether its workers update shared parameters without waiting for each other

    @property
    def learns_whole_rollouts(self) -> bool:
        """Return whether a rollout is one batch, so that training.n_steps is what makes it larger."""
        return not self.has_minibatches and not self.has_actors

    @property
    def is_in_step(self) -> bool:
        """Return whether all workers take every optimiser step together."""
        return not self.has_actors and not self.is_lock_free


# A3C's workers have no common step whose gradients could be summed over machines.
TRAITS = {
    traits.name: traits
    for traits in (
        Traits("ppo", "PPO", ("allreduce", "local_sgd"), has_minibatches=True),
        Traits("a2c", "A2C", ("allreduce", "local_sgd")),
        Traits("a3c", "A3C", ("async",), is_lock_free=True),
        Traits("impala", "IMPALA", ("allreduce", "async"), has_actors=True),
    )
}
LABELS = {name: traits.label for name, traits in TRAITS.items()}
TRAITS_BY_LABEL = {traits.label: traits for traits in TRAITS.values()}
