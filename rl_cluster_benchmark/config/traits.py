"""What the rest of the program knows of an algorithm without knowing its maths: the names and how its processes work.

algorithms/registry.py adds what learns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """An algorithm as configs, plans, tools and reports see it."""

    name: str  # in configs and on the command line
    label: str  # in texts
    synchronisations: tuple[str, ...]  # how machines may keep together (cluster.sync)
    has_minibatches: bool = False  # it learns from a rollout in epochs of minibatches
    has_actors: bool = False  # outside sequential mode some processes act and others learn from unrolls
    is_lock_free: bool = False  # its workers update shared parameters, and none waits for another

    @property
    def is_in_step(self) -> bool:
        """Return whether all its workers take every step of the optimiser together."""
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
