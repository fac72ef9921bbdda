"""The first of IMPALA's learners: it hands out unrolls, publishes weights, counts, and reports to the parent."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_cluster_benchmark.algorithms.impala import Impala
from rl_cluster_benchmark.algorithms.on_policy import learning_rate, nothing_learned
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.actor_learner.unrolls import UnrollStore
from rl_cluster_benchmark.execution.machines.other_machines import News, OtherMachines
from rl_cluster_benchmark.execution.messages import FinalState, NothingLeftToDo, Orders, StateToSave, UpdateMade
from rl_cluster_benchmark.learning.losses import mean_of
from rl_cluster_benchmark.processes.claims import MOST, Claims
from rl_cluster_benchmark.processes.process_times import TimeKeeper
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.shared_memory import MemoryLayout, SharedTensors
from rl_cluster_benchmark.processes.waiting import wait_until
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.course import Goal, SaveTimer

TURNS = 3  # of each learner in a step: enough that one on a faster core can do more than another
REPLAY = -1  # in place of an unroll's row: one from the learner's own replay


def group_size(unrolls: int, num_learners: int, fit_the_cache: int) -> int:
    """Return how many unrolls a learner takes at once: what its cache holds, or fewer so that each has turns enough."""
    fair = unrolls if num_learners == 1 else unrolls // (TURNS * num_learners)
    return max(1, min(fit_the_cache, fair), -(-unrolls // MOST))


class StepBoard:
    """What all learners have to know of a step. The leader writes it; all have read it when their gradients meet."""

    @staticmethod
    def layout(unrolls_per_step: int) -> MemoryLayout:
        return {
            "step": ((1,), torch.int64),  # the number of the step that is described here; written last
            "stop": ((1,), torch.int64),
            "rows": ((unrolls_per_step,), torch.int64),
            "rate": ((1,), torch.float64),
            "reward_divisor": ((1,), torch.float64),
            "correction": ((1,), torch.int64),  # of the parameters: the number of the one that is due after the step
        }

    def __init__(self, shared: SharedTensors, num_learners: int, fit_the_cache: int) -> None:
        self._step, self._stop, self._rows = (shared[name].numpy() for name in ("step", "stop", "rows"))
        self._rate, self._divisor = shared["rate"].numpy(), shared["reward_divisor"].numpy()
        self._correction = shared["correction"].numpy()
        self.num_rows = len(self._rows)
        self.group_size = group_size(self.num_rows, num_learners, fit_the_cache)
        self.num_groups = -(-self.num_rows // self.group_size)

    def announce(self, step: int, rows: NDArray[np.int64], rate: float, divisor: float, correction: int = 0) -> None:
        self._rows[:], self._rate[0], self._divisor[0], self._correction[0] = rows, rate, divisor, correction
        self._step[0] = step

    def stop(self) -> None:
        self._stop[0] = 1

    @property
    def stopped(self) -> bool:
        return bool(self._stop[0])

    def wait(self, step: int, clock: PhaseClock) -> bool:
        """Wait for a step; return False if the run ends before it."""
        wait_until(lambda: self._step[0] >= step or self.stopped, clock)
        return bool(self._step[0] >= step)

    @property
    def rate(self) -> float:
        return float(self._rate[0])

    @property
    def divisor(self) -> float:
        return float(self._divisor[0])

    @property
    def correction(self) -> int:
        return int(self._correction[0])

    def group(self, number: int) -> list[int]:
        return self._rows[number * self.group_size : (number + 1) * self.group_size].tolist()


class LeadingLearner:
    """What the first learner does besides learning. All counts of a run, and its end, are its own."""

    def __init__(
        self, config: Config, shared: SharedTensors, board: StepBoard, claims: Claims, store: UnrollStore,
        weights: PublishedWeights, algorithm: Impala, connection: Connection, keeper: TimeKeeper,
        progress: dict[str, Any], others: OtherMachines, steps_per_update: int,
    ) -> None:  # fmt: skip
        self.config, self.board, self.claims, self.store, self.weights = config, board, claims, store, weights
        self.algorithm, self.connection, self.keeper, self.others = algorithm, connection, keeper, others
        self._goal, self._save_timer, self._orders = Goal(config.training), SaveTimer(config), Orders(shared["order"])
        self._left_out = shared["left_out"][:, 0].numpy()
        self._left_out_seen = 0
        self.steps, self.updates, self._elapsed_before = progress["steps"], progress["updates"], progress["elapsed"]
        self.steps_per_update = steps_per_update
        self._done: list[dict[str, float]] = []  # losses of the steps of the update in hand
        self._new_steps, self._lags, self._ages, self._in_use = 0, [], [], []  # type: ignore[var-annotated]
        self._rows = np.empty(0, dtype=np.int64)
        self._count = self._passes_left = 0

    def hand_out(self, clock: PhaseClock) -> None:
        """Announce the next step, or that there will be none.

        It is another pass over the unrolls of the step before, or it begins as soon as there are enough new ones.
        """
        if self._passes_left > 0:
            self._hand_out_again(clock)
        else:
            self._hand_out_new(clock)

    def _hand_out_again(self, clock: PhaseClock) -> None:
        """Announce another pass. It counts no steps, as its unrolls are not new."""
        with clock.phase("communication"):
            rate = learning_rate(self.config.training, self._fraction)
            news = self.others.agree(News(stop=self._should_stop(), rate=rate, steps=0, returns=[0.0] * 3))
        if news.stop:
            self.board.stop()
            return
        self.algorithm.normalize_rewards.scale.add(*news.returns)  # of machines that are not in step with this one
        self._passes_left -= 1
        self._lags += (self.weights.version - self.store.versions(self._rows)).tolist()
        self._announce(self._rows, news.rate)

    def _hand_out_new(self, clock: PhaseClock) -> None:
        replayed = self._replayed()
        wanted = self.board.num_rows - replayed
        found = self.store.full()

        def ready() -> bool:
            nonlocal found
            found = self.store.full()
            return len(found) >= wanted or self._should_stop()

        wait_until(ready, clock)
        stop = self._should_stop()
        self._rows = found[: 0 if stop else wanted]
        left_out = self._left_out_since()
        self._left_out_seen += left_out
        with clock.phase("communication"):
            news = self.others.agree(self._news(stop, left_out))
        if news.stop:
            self._new_steps += left_out
            self.board.stop()
            return
        self._note(news, len(found))
        self._passes_left = self.config.impala.passes - 1
        self._announce(np.concatenate([self._rows, np.full(replayed, REPLAY)]), news.rate)

    def _announce(self, rows: NDArray[np.int64], rate: float) -> None:
        self._count += 1
        self.claims.offer(range(self.board.num_groups))
        divisor = self.algorithm.normalize_rewards.scale.divisor
        self.board.announce(self._count, rows, rate, divisor, self.others.correction())

    def step_done(self, losses: dict[str, float]) -> bool:
        """Take note that all learners have taken the step; return True when that ends an update."""
        if self._passes_left == 0:
            self.store.release(self._rows)
        self.weights.publish(self.algorithm.learner.flat)
        self.others.step_done()
        self._done.append(losses)
        return len(self._done) == self.steps_per_update

    def record(self) -> None:
        """Report an update, or as much of one as was done."""
        if not self._done and not self._new_steps:
            return
        self.updates += 1
        self.steps += self._new_steps
        self.others.update_done(self._new_steps)
        lags = self._lags or [0.0]
        asynchrony = {
            "async/policy_lag": float(np.mean(lags)),
            "async/policy_lag_max": float(np.max(lags)),
            "async/unroll_age": float(np.mean(self._ages or [0.0])),
            "async/slots_in_use": float(np.mean(self._in_use or [0.0])) / self.store.capacity,
        }
        losses = mean_of(self._done) if self._done else nothing_learned(self.config.training, self._fraction)
        self.connection.send(UpdateMade(self._new_steps, losses, self._elapsed, asynchrony=asynchrony))
        self._done, self._new_steps, self._lags, self._ages, self._in_use = [], 0, [], [], []

    def checkpoint_due(self) -> bool:
        return self._save_timer.is_due(self.updates)

    def save(self, state: dict[str, Any]) -> None:
        self.connection.send(StateToSave(checkpoint.pack(state)))
        self._save_timer.restart()

    def finish(self, state: dict[str, Any]) -> None:
        self.connection.send(FinalState(checkpoint.pack(state)))

    def _news(self, stop: bool, left_out: int) -> News:
        """Return what is new with the next unrolls; steps that were left out were taken, if not learned from."""
        rows = torch.from_numpy(self._rows)
        return News(
            stop=stop,
            rate=learning_rate(self.config.training, self._fraction),
            steps=int(self.store["valid"][rows].sum()) + left_out,
            returns=self.store["return_moments"][rows].sum(0).tolist(),
        )

    def _note(self, news: News, in_use: int) -> None:
        """Take down statistics of the unrolls about to be learned from."""
        rows = self._rows
        self._new_steps += news.steps
        self._lags += (self.weights.version - self.store.versions(rows)).tolist()
        self._ages += self.store.ages(rows).tolist()
        self._in_use.append(in_use)
        self.algorithm.normalize_rewards.scale.add(*news.returns)

    def _replayed(self) -> int:
        """Return how many of the next step's unrolls are to be old ones: over many steps the fraction asked for."""
        if self._count == 0:  # there are none yet
            return 0
        per_step = self.config.impala.replay_fraction * self.board.num_rows
        return int((self._count + 1) * per_step) - int(self._count * per_step)

    def _left_out_since(self) -> int:
        """Return the steps of unrolls with NaN or infinite numbers since the last report."""
        return int(self._left_out.sum()) - self._left_out_seen

    @property
    def _elapsed(self) -> float:
        """Return the seconds of training, those before a resume included."""
        return self._elapsed_before + self.keeper.elapsed

    @property
    def _fraction(self) -> float:
        return self._goal.fraction(self._all_steps, self._elapsed)

    @property
    def _all_steps(self) -> int:
        return self.steps + self.others.steps

    def _should_stop(self) -> bool:
        """Return whether to end now; an update in hand is finished, but for a signal."""
        if self._orders.interrupted():
            return True
        complete = self._goal.is_reached(self._all_steps + self._left_out_since())
        return not self._done and (complete or self._orders.should_stop(self.updates))

    def wait_for_others(self) -> None:
        """Say that nothing is left to do but to save, and wait until that is true of all machines."""
        self.connection.send(NothingLeftToDo())
        self.others.wait_for_end(self.algorithm.learner, self.weights)
