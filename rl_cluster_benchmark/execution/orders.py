"""What the parent process of a run tells its workers, through memory that all of them see."""

from __future__ import annotations

from torch import Tensor

from rl_cluster_benchmark.run.run import Run

TIME_IS_UP, INTERRUPTED = 1, 2  # 0 is none


def order_of(run: Run) -> int:
    """Return what the workers of a run are to be told now: INTERRUPTED, TIME_IS_UP, or 0 to go on."""
    return INTERRUPTED if run.interrupted() else TIME_IS_UP if run.should_stop() else 0


class Orders:
    """A worker's view of the order, which is the first number of the memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory.numpy()

    def interrupted(self) -> bool:
        """Return whether to end as soon as the model is in good order."""
        return bool(self._memory[0] == INTERRUPTED)

    def should_stop(self, updates: int) -> bool:
        """Return whether to drop a rollout: when time is up, not before there has been an update."""
        return self.interrupted() or bool(self._memory[0] == TIME_IS_UP and updates > 0)
