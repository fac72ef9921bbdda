"""A run: its counters, and everything that is written while it goes on.

In sequential mode the training loop calls its methods itself; in the other modes the parent process does, with what the
workers report (see execution/loop.py for the calls).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.learning.losses import COUNTS
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.run import checkpoint, metrics, provenance, resumption
from rl_cluster_benchmark.run.checkpoint import all_finite
from rl_cluster_benchmark.run.course import Goal, SaveTimer
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.memory import MemoryReadings
from rl_cluster_benchmark.run.metrics import Asynchrony, EpisodeStatistics
from rl_cluster_benchmark.run.progress import Progress, Status
from rl_cluster_benchmark.run.saver import Saver

SHORTEST_RATE = 1.0  # seconds, the shortest time that a logged speed is the mean over
FINAL_FPS_UPDATES = 10  # that the final speed is the mean over
BAD_IN_A_ROW = 100  # consecutive updates left out because of NaN or infinity, after which a run ends


@dataclass(frozen=True)
class RunMachines:
    """The machines of a run, if there are several."""

    shares: list[tuple[str, int, int]]  # (name, workers, usable cores) of each
    jobs: list[str]  # who started them, and may do it again
    num_learners: int  # of IMPALA, on all of them
    memory_elsewhere: Callable[[], int]  # bytes in use on all but this one


class Run:
    """A training run: counts steps and updates, logs, saves checkpoints, and writes the summary.

    Its training is a `with summary.written(run)`, which ends it.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        directory: RunDirectory,
        signals: Signals,
        *,
        resume: bool = False,
        resumed_path: Path | None = None,
        resumed_from: dict[str, Any] | None = None,
        may_write: Callable[[], None] = lambda: None,
        may_begin: Callable[[], None] = lambda: None,
        machines: RunMachines | None = None,
    ) -> None:
        """`may_write` raises if somebody else has taken over, `may_begin` if what is there is not what was seen."""
        self.config, self.plan, self.directory, self.signals = config, plan, directory, signals
        self.resume, self.resumed_path, self.resumed_from = resume, resumed_path, resumed_from
        self._goal, self._save_timer = Goal(config.training), SaveTimer(config)
        self.run_id = uuid.uuid4().hex  # stays the same when the run is resumed or its files are copied
        self.code = provenance.code()  # read now, because a checkout may be at another commit when the run ends
        self.newest_checkpoint: dict[str, Any] | None = None  # {file, digest, steps}; evaluations refer to the digest
        self.clock = PhaseClock()
        self.episodes = EpisodeStatistics()
        self.asynchrony = Asynchrony()
        self.bad_numbers: dict[str, float] = {}  # counts of what was NaN or infinite
        self._bad_in_a_row = 0
        self.steps = self.updates = 0
        self.peak_memory = 0
        self.peak_worker_memory = 0  # of the largest worker process
        self._num_workers_seen = 0
        self.last_update_at = 0.0  # seconds of training
        self._elapsed_before = self._cpu_before = 0.0
        self._parts_before: list[dict[str, Any]] = []  # what earlier parts of the run were trained with
        if resumed_from is not None:
            self._restore(resumed_from["progress"])
            if resumed_path is not None:
                self._note_checkpoint(resumed_path, checkpoint.digest_of(resumed_path), self.steps)
        self._unlogged: dict[str, float] | None = None  # the last update's line, until it is written to the log
        self._metrics: metrics.MetricsWriter | None = None
        self._progress: Progress | None = None
        self._started = self._cpu_started = 0.0
        self._memory_readings = MemoryReadings()
        self._saver = Saver()
        self.worker_cpu_seconds = 0.0  # of worker processes, reported by them
        self._may_write, self._may_begin = may_write, may_begin
        self.machines = machines or RunMachines([], [], plan.num_learners, lambda: 0)

    # The course of a run

    def start(self) -> None:
        """Begin the run's files and start to count time; called when all checks of the input have been passed."""
        if self.config.logging.tensorboard:
            metrics.summary_writer()  # raises, if it is not installed, before anything is removed
        self.check_begun()
        self._may_write()
        self._may_begin()
        if not self.resume:
            self.directory.begin_run(self.machines.jobs)
        write_atomically(self.directory.config, configs.to_yaml(self.config).encode())
        resumption.remove_results_after(self.directory, self.updates)
        metrics.cut_after(self.directory.metrics_log, self.updates)
        self._metrics = metrics.MetricsWriter(
            self.directory.metrics_log,
            tensorboard=self.config.logging.tensorboard,
            resumed_at=self.steps if self.resume else None,
        )
        self._progress = Progress()
        self.read_memory()  # now, while all workers exist: at the first update of a short run some may have ended
        self._memory_readings.next_at = 0.0  # and again at the first update, when all buffers are in use
        self._started, self._cpu_started = time.perf_counter(), time.process_time()
        self._save_timer.restart()
        self.recent: deque[tuple[float, int]] = deque([(self.elapsed, self.steps)])
        self._logs: deque[tuple[float, int]] = deque([self.recent[0]])  # (time, steps) of recent log lines

    @property
    def elapsed(self) -> float:
        """Return the seconds of training so far, those before a resume included.

        It is never less than a time that a worker has reported, whose clock may be ahead.
        """
        here = time.perf_counter() - self._started if self._started else 0.0
        return max(self._elapsed_before + here, self.last_update_at)

    @property
    def cpu_seconds(self) -> float:
        here = time.process_time() - self._cpu_started if self._started else 0.0
        return self._cpu_before + here + self.worker_cpu_seconds

    @property
    def num_workers(self) -> int:
        return sum(workers for _, workers, _ in self.machines.shares) or self.plan.num_workers

    @property
    def usable_cores(self) -> int:
        return sum(cores for _, _, cores in self.machines.shares) or self.plan.machine.usable_cores

    @property
    def fraction(self) -> float:
        """Return how much of the run is done, 0 to 1: by steps or by time, whichever is further."""
        return self._goal.fraction(self.steps, self.elapsed)

    def interrupted(self) -> bool:
        """Return whether a signal has asked the run to end as soon as the model is in a consistent state."""
        return self.signals.received is not None

    def check_begun(self) -> None:
        """Raise Interrupted if a signal came before `start`, when nothing has been written yet."""
        if self._metrics is None:
            self.signals.check()

    def should_stop(self) -> bool:
        """Return whether to give up the current rollout: after a signal, or when time is up.

        Updates do not ask this: one that has begun when time is up is completed.
        """
        return self.interrupted() or (self.updates > 0 and self._goal.time_is_up(self.elapsed))

    def is_complete(self) -> bool:
        return self._goal.is_reached(self.steps)

    def record(
        self,
        steps: int,
        episodes: Sequence[tuple[float, ...]],
        losses: dict[str, float],
        asynchrony: dict[str, float] | None = None,
        at: float | None = None,
    ) -> None:
        """Count an update of `steps` environment steps, and log and show it if it is due.

        `at` is the time of the update in seconds of training, by the clock of the process that made it.
        """
        self._saver.check()
        self.asynchrony.add(asynchrony or {})
        is_whole = not math.isfinite(losses["policy_loss"])  # all optimiser steps of the update were left out
        self.note_bad({name: losses.pop(name, 0.0) for name in COUNTS}, is_whole_update=is_whole)
        if not is_whole:
            self._bad_in_a_row = 0
        self.updates += 1
        self.steps += steps
        self.episodes.add(episodes)
        self.last_update_at = self.elapsed if at is None else max(self.last_update_at, at)
        self.recent.append((self.last_update_at, self.steps))
        _forget_older_updates(self.recent)
        if self._memory_readings.is_due():
            self.read_memory()
        self._unlogged = self._line(losses, asynchrony or {})
        if self.updates % self.config.training.log_interval == 0:
            self._log()

    def note_bad(self, counts: Mapping[str, float], *, is_whole_update: bool) -> None:
        """Count NaN and infinite numbers because of which something was left out (training.on_nan = skip).

        Raise TrainingFailedError when BAD_IN_A_ROW whole updates have been left out.
        """
        found = {name: count for name, count in counts.items() if count}
        if not found:
            return
        if not self.bad_numbers:
            what = ", ".join(f"{name.replace('_', ' ')}: {count:.0f}" for name, count in found.items())
            when = f"after update {self.updates}"
            print(f"Warning: NaN or infinite numbers {when} ({what}); further ones are only counted.", flush=True)
        for name, count in found.items():
            self.bad_numbers[name] = self.bad_numbers.get(name, 0.0) + count
        self._bad_in_a_row += is_whole_update
        if self._bad_in_a_row >= BAD_IN_A_ROW:
            raise TrainingFailedError(
                f"{BAD_IN_A_ROW} updates in a row met numbers that are NaN or infinite: nothing is learned any more. "
                "The last good checkpoint is kept."
            )

    def checkpoint_due(self) -> bool:
        return self._save_timer.is_due(self.updates)

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint of the learner's state and of the run's own."""
        self._save(self.directory.step_checkpoint(self.steps), state)

    def finish(self, state: Callable[[], dict[str, Any]]) -> None:
        """Write the last checkpoint: the final one, or one of a step if the run was interrupted."""
        path = self.directory.step_checkpoint(self.steps) if self.interrupted() else self.directory.final_checkpoint()
        before = self.resumed_from["progress"]["updates"] if self.resumed_from is not None else None
        if (path, self.updates) == (self.resumed_path, before):
            return  # this checkpoint exists already, and evaluations may refer to its digest
        self._save(path, state())
        self._saver.wait()
        self._saver.check()

    def waits_for(self) -> Path | None:
        """Return the file that is still being written to the disk, or None."""
        return self._saver.path

    def has_finished(self) -> bool:
        """Return whether this is a resumed run that had already finished, so that nothing is left to do."""
        at_its_end = self.is_complete() or (self.updates > 0 and self._goal.time_is_up(self.elapsed))
        was_final = self.resumed_path == self.directory.final_checkpoint()
        return at_its_end and was_final and resumption.finished_with(self.directory) == self.updates

    # What is written

    def _line(self, losses: dict[str, float], asynchrony: dict[str, float]) -> dict[str, float]:
        """Return the log line of the last update; `_log` adds the speed, which depends on the line before it."""
        now = self.last_update_at
        line: dict[str, float] = {"step": self.steps, "time": round(now, 3), "update": self.updates, "charts/SPS": 0.0}
        line["charts/learning_rate"] = losses["learning_rate"]
        line["charts/episodes"] = self.episodes.count
        line["charts/return_sum"] = self.episodes.total
        if self.episodes.mean_reward is not None and self.episodes.mean_length is not None:
            line["charts/episodic_return"] = self.episodes.mean_reward
            line["charts/episodic_length"] = self.episodes.mean_length
        line |= {f"losses/{name}": value for name, value in losses.items() if name != "learning_rate"}
        line |= {f"time/{name}": share for name, share in self.clock.shares(now).items()}
        line |= asynchrony
        line |= {f"system/{name}": count for name, count in self.bad_numbers.items()}
        line["system/memory_gb"] = self._memory / 1e9
        line["system/cpu_utilization"] = self.cpu_seconds / now / self.usable_cores
        return line

    def _log(self) -> None:
        """Write and show the line of the last update, unless that has been done."""
        line, self._unlogged = self._unlogged, None
        if line is None:
            return
        now = self.last_update_at
        fps = line["charts/SPS"] = self._rate(now)
        assert self._metrics is not None
        assert self._progress is not None
        self._metrics.write({name: value for name, value in line.items() if math.isfinite(value)})
        left = now / self.fraction * (1 - self.fraction) if self.fraction > 0 else None
        self._progress.show(
            Status(
                fraction=self.fraction,
                elapsed=now,
                seconds_left=left,
                step=self.steps,
                update=self.updates,
                fps=fps,
                loss=line["losses/policy_loss"] + line["losses/value_loss"],
                entropy=line["losses/entropy"],
                mean_reward=self.episodes.mean_reward,
                mean_length=self.episodes.mean_length,
            )
        )

    def _rate(self, now: float) -> float:
        """Return the steps per second since the last log line, or over the last second if that is longer.

        A shorter time would give wild figures, because the reports of several workers do not come in order.
        """
        while len(self._logs) > 1 and now - self._logs[1][0] >= SHORTEST_RATE:
            self._logs.popleft()
        since, steps_then = self._logs[0]
        self._logs.append((now, self.steps))
        return (self.steps - steps_then) / max(1e-9, now - since)

    def _save(self, path: Path, learner: dict[str, Any]) -> None:
        progress = self.progress_state()
        for what, value in (
            ("network's weights", learner["model"]),
            ("optimiser's state", learner["algorithm"]),
            ("run's statistics", progress),
        ):
            if not all_finite(value):
                raise TrainingFailedError(
                    f"The {what} became NaN or infinite by update {self.updates}; the last good checkpoint is kept. "
                    "A new run with a smaller training.learning_rate may help."
                )
        self._log()  # so that the log has a line for the update that a resumed run starts from
        content, steps = (
            checkpoint.packed(learner | {"config": configs.to_dict(self.config), "progress": progress}),
            self.steps,
        )

        def write() -> None:
            self._may_write()
            assert self._metrics is not None
            self._metrics.flush()
            self._note_checkpoint(path, checkpoint.write(path, content), steps)
            checkpoint.prune(self.directory, self.config.logging.keep_checkpoints)

        self._saver.save(path, write)
        self._save_timer.restart()

    def _note_checkpoint(self, path: Path, digest: str | None, steps: int) -> None:
        if digest is not None:
            file = os.path.relpath(path, self.directory.root)
            self.newest_checkpoint = {"file": file, "digest": digest, "steps": steps}

    def progress_state(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "steps": self.steps,
            "updates": self.updates,
            "elapsed": self.elapsed,
            "cpu_seconds": self.cpu_seconds,
            "phase_seconds": dict(self.clock.seconds),
            "peak_memory": self.peak_memory,
            "peak_worker_memory": self.peak_worker_memory,
            "episodes": self.episodes.state_dict(),
            "asynchrony": self.asynchrony.state_dict(),
            "bad_numbers": dict(self.bad_numbers),
            "parts": self.parts(),
            # Every random stream is named by the seed and the number of the update (see seeding.py).
            "random_state": {"seed": self.config.env.seed, "next_update": self.updates},
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.steps, self.updates, self.peak_memory = state["steps"], state["updates"], state["peak_memory"]
        self.peak_worker_memory = state.get("peak_worker_memory", 0)  # missing in older checkpoints
        self._elapsed_before, self._cpu_before = state["elapsed"], state["cpu_seconds"]
        self.last_update_at = state["elapsed"]
        self.clock.seconds |= state["phase_seconds"]
        self.episodes.load_state_dict(state["episodes"])
        self.asynchrony.load_state_dict(state["asynchrony"])
        self.bad_numbers = dict(state["bad_numbers"])
        self.run_id = state.get("run_id") or self.run_id
        self._parts_before = state.get("parts", [])  # older checkpoints do not say

    def parts(self) -> list[dict[str, Any]]:
        """Return what the parts of the run were trained with, between which it was resumed: each different one once."""
        if self.resumed_from is not None and self.updates == self.resumed_from["progress"]["updates"]:
            return self._parts_before  # this one has trained nothing yet
        here = {
            "cpu_model": self.plan.machine.cpu_model,
            "usable_cores": self.usable_cores,
            "num_workers": self.num_workers,
            "num_learners": self.machines.num_learners,
            "precision": self.plan.precision,
            "engine": self.plan.engine,
            "git_commit": self.code["git_commit"],
        }
        return self._parts_before if here in self._parts_before else [*self._parts_before, here]

    def read_memory(self) -> None:
        sizes = self._memory_readings.read()
        self._memory = sum(sizes.values()) + self.machines.memory_elsewhere()
        self.peak_memory = max(self.peak_memory, self._memory)
        workers = [sizes[worker.pid] for worker in multiprocessing.active_children() if worker.pid in sizes]
        if len(workers) >= self._num_workers_seen:  # else some have ended, and the rest are charged for shared pages
            self._num_workers_seen = len(workers)
            self.peak_worker_memory = max(self.peak_worker_memory, *workers, 0)

    # The end

    def has_begun(self) -> bool:
        """Return whether `start` has begun the run's files."""
        return self._metrics is not None

    def settle(self) -> None:
        """Wait until everything is saved, and write what is left for the log: nothing follows but the summary."""
        self._saver.wait()
        self._may_write()
        self._log()

    def close(self) -> None:
        """Close the log and the progress display, once everything is saved; a second call does nothing."""
        self._saver.wait()
        if self._metrics is not None:
            self._metrics.close()
        if self._progress is not None:
            self._progress.close()


def _forget_older_updates(recent: deque[tuple[float, int]]) -> None:
    """Keep (time, steps) of the last ten updates, and of those before that the last second needs."""
    while len(recent) > FINAL_FPS_UPDATES + 1 and recent[-1][0] - recent[1][0] >= SHORTEST_RATE:
        recent.popleft()
