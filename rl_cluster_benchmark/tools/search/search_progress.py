"""How far a search is: a bar on a terminal, a plain line for each trial elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence

from tqdm import tqdm

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.tools.search.study import Trial

SECONDS_BETWEEN_LOOKS = 10.0  # at what other processes have done


class SearchProgress:
    """Trials done, the best so far, the time left. `limit` and `seconds` end the search, if they are given."""

    def __init__(self, trials: Sequence[Trial], limit: int | None, seconds: float | None, jobs: int) -> None:
        self.limit, self.seconds, self.jobs = limit, seconds, jobs
        self.started = self._looked = time.monotonic()
        self._bar: tqdm | None = None
        if sys.stderr is not None and sys.stderr.isatty():
            form = "{desc}{percentage:3.0f}%|{bar}|{postfix}" if limit is not None else "{desc}{postfix}"
            self._bar = tqdm(total=limit, bar_format=form, dynamic_ncols=True, desc="Search")
        self.update(trials)

    def update(self, trials: Sequence[Trial], fractions: Sequence[float] = ()) -> None:
        """Take in how the trials stand; `fractions` tells how much of those in hand is done."""
        self.trials = list(trials)
        if self._bar is not None:
            done = sum(trial.state != "running" for trial in trials)
            self._bar.n = min(done + sum(fractions), self.limit) if self.limit is not None else done
            self._bar.set_postfix_str(self.status(fractions))

    def show(self, trials: Callable[[], Sequence[Trial]], fractions: Sequence[float]) -> None:
        """Draw the bar again now and then."""
        if self._bar is not None and time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            self.update(trials(), fractions)

    def say(self, line: str) -> None:
        """Print a line about a trial, above the bar if there is one."""
        with contextlib.suppress(OSError, ValueError):  # the reader of our output is gone; the search goes on
            if self._bar is not None:
                self._bar.write(line)
            else:
                print(line, flush=True)

    def status(self, fractions: Sequence[float] = ()) -> str:
        done = sum(trial.state != "running" for trial in self.trials)
        of = f" of {self.limit}" if self.limit is not None else ""
        best = max((trial for trial in self.trials if trial.score is not None), key=_score, default=None)
        parts = [f"{done}{of} trials done"]
        parts.append(f"best {best.score:.3f} (trial {best.number})" if best is not None else "no score yet")
        left = self.seconds_left(done + sum(fractions))
        if left:
            parts.append(f"about {text.duration(left)} left")
        return ", ".join(parts)

    def seconds_left(self, done: float) -> float | None:
        """Return the time until the trials are done, from what those before took, or until the budget is over."""
        left = []
        taken = [trial.seconds for trial in self.trials if trial.state in ("complete", "pruned")]
        if self.limit is not None and taken:
            left.append(max(0.0, self.limit - done) * sum(taken) / len(taken) / self.jobs)
        if self.seconds is not None:
            left.append(max(0.0, self.seconds - (time.monotonic() - self.started)))
        return min(left) if left else None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _score(trial: Trial) -> float:
    return trial.score if trial.score is not None else float("-inf")
