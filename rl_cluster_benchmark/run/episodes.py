"""Statistics over finished episodes: the first 100, the last 100, and the best mean over 100."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import fmean, pstdev
from typing import Any

WINDOW = 100


class EpisodeStatistics:
    """Rewards and lengths of a run's finished episodes."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0  # sum of the rewards of all episodes
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=WINDOW)
        self.last_lengths: deque[int] = deque(maxlen=WINDOW)
        self.best: float | None = None

    def add(self, episodes: Iterable[tuple[float, ...]]) -> None:
        """Add finished episodes in order, each a tuple that begins with (reward, length)."""
        for reward, length, *_ in episodes:
            self.count += 1
            self.total += reward
            self.last.append(reward)
            self.last_lengths.append(int(length))
            if len(self.first) < WINDOW:
                self.first.append(reward)
            if len(self.last) == WINDOW:
                mean = fmean(self.last)
                self.best = mean if self.best is None else max(self.best, mean)

    @property
    def mean_reward(self) -> float | None:
        return fmean(self.last) if self.last else None

    @property
    def mean_length(self) -> float | None:
        return fmean(self.last_lengths) if self.last_lengths else None

    def summary(self) -> dict[str, float | int | None]:
        """Return mean rewards over 100 episodes, or over all if there are fewer; None if no episode has ended."""
        return {
            "initial_reward": fmean(self.first) if self.first else None,
            "initial_reward_std": pstdev(self.first) if self.first else None,
            "final_reward": self.mean_reward,
            "final_reward_std": pstdev(self.last) if self.last else None,
            "best_reward": self.best if self.best is not None else self.mean_reward,
            "num_episodes": self.count,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "total": self.total,
            "first": list(self.first),
            "last": list(self.last),
            "last_lengths": list(self.last_lengths),
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.best, self.first = state["count"], state["best"], list(state["first"])
        self.total = state.get("total", 0.0)  # missing in older checkpoints
        self.last.extend(state["last"])
        self.last_lengths.extend(state["last_lengths"])
