"""What IMPALA's leader on one machine, the first of its learners, has to do with those on other machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_cluster_benchmark.core.timing import beat
from rl_cluster_benchmark.execution.machines.machine_averaging import MOMENTS, NUM_COUNTS, STEPS, UPDATES
from rl_cluster_benchmark.learning.learner import Learner
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.shared_memory import MemoryLayout, SharedTensors

NAP_SECONDS = 0.001


@dataclass
class News:
    """What a leader has to say, or to hear, of the next step."""

    stop: bool
    rate: float  # the learning rate
    steps: int  # of the environments, that are new
    returns: list[float]  # number, sum and sum of squares of discounted returns


class OtherMachines:
    """What a leader does where there are no other machines, or they need no words: nothing but wait for the end."""

    steps = 0  # that other machines have counted for themselves

    def __init__(self, flags: SharedTensors) -> None:
        self.flags = flags

    def agree(self, news: News) -> News:
        """Return what is new on all machines that take the step together."""
        return news

    def correction(self) -> int:
        """Return the number of the correction to the parameters that is due after the next step; 0 if none is."""
        return 0

    def step_done(self) -> None:
        """Take note that all learners of this machine have taken the step."""

    def update_done(self, steps: int) -> None:
        """Take note of an update, which brought so many steps of the environments."""

    def wait_for_end(self, learner: Learner, weights: PublishedWeights) -> None:
        """Wait until all machines are done."""
        while not int(self.flags["closed"][0]):
            beat(is_waiting=True)  # as long as the other machines are there
            time.sleep(NAP_SECONDS)


class MachinesInStep(OtherMachines):
    """What a leader does where all machines take every step together, and their gradients are summed."""

    def __init__(self, flags: SharedTensors, add_up: Callable[[Tensor], None], *, is_head: bool) -> None:
        super().__init__(flags)
        self._add_up, self._is_head = add_up, is_head

    def agree(self, news: News) -> News:
        rate = news.rate if self._is_head else 0.0  # clocks differ, and all must take the same step
        total = torch.tensor([news.stop, rate, news.steps, *news.returns], dtype=torch.float64)
        self._add_up(total)
        stop, rate, steps, *returns = total.tolist()
        return News(stop > 0, rate, int(steps), returns)


class IndependentMachines(OtherMachines):
    """What a leader does where machines take their own steps, corrected now and then towards the mean of all.

    The node process writes corrections, the learners add them. Each has one writer and a number of its own.
    """

    @staticmethod
    def layout(num_parameters: int) -> MemoryLayout:
        return {
            "here": ((NUM_COUNTS,), torch.float64),  # counts of this machine, by its leader
            "parameters_correction": ((num_parameters,), torch.float32),
            "written": ((1,), torch.int64),  # the number of the correction that is there, by the node process
            "taken": ((1,), torch.int64),  # the number of the last one that all learners have added, by the leader
        }

    def __init__(self, flags: SharedTensors) -> None:
        super().__init__(flags)
        self._announced = self._added = 0
        self._returns_seen = torch.zeros(3, dtype=torch.float64)

    @property
    def steps(self) -> int:  # type: ignore[override]
        return int(self.flags["elsewhere"][STEPS])

    def agree(self, news: News) -> News:
        """Add what others have added to the statistics of returns since the last time, without asking anybody."""
        if not news.stop:
            self.flags["here"][MOMENTS] += torch.tensor(news.returns, dtype=torch.float64)
            elsewhere = self.flags["elsewhere"][MOMENTS].clone()
            fresh, self._returns_seen = elsewhere - self._returns_seen, elsewhere
            news.returns = [mine + theirs for mine, theirs in zip(news.returns, fresh.tolist(), strict=True)]
        return news

    def correction(self) -> int:
        self._announced = int(self.flags["written"][0])
        return self._announced

    def step_done(self) -> None:
        """Say which correction all learners have added: that of the step before; of this one they have only heard."""
        self.flags["taken"][0] = self._added
        self._added = self._announced

    def update_done(self, steps: int) -> None:
        self.flags["here"][STEPS] += steps
        self.flags["here"][UPDATES] += 1

    def wait_for_end(self, learner: Learner, weights: PublishedWeights) -> None:
        """Wait until all machines are done, and add the corrections that come meanwhile: nobody else needs them now."""
        corrections = Corrections(self.flags, self._announced)
        is_closed = False
        while not is_closed:
            is_closed = bool(self.flags["closed"][0])
            number = int(self.flags["written"][0])
            if corrections.add_to(learner, number):
                weights.publish(learner.flat)
            self.flags["taken"][0] = number
            beat(is_waiting=True)
            time.sleep(NAP_SECONDS)


class Corrections:
    """A learner's side of the corrections: it adds each of them once."""

    def __init__(self, flags: SharedTensors, added: int = 0) -> None:
        self._flags, self._added = flags, added

    def add_to(self, learner: Learner, number: int) -> bool:
        """Add the correction of that number, unless it has been; return whether there was anything to add."""
        if number == self._added:
            return False
        learner.flat.add_(self._flags["parameters_correction"])
        learner.model.weights_changed()
        self._added = number
        return True
