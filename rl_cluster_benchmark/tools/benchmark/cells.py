"""One cell: what is left to do for it, and doing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.processes.child_process import ChildProcess, reason_of_failure, rlcb
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.analysis.runs import RunRecord, UnusableRunError, is_running, load_run
from rl_cluster_benchmark.tools.benchmark.matrix import Cell, Matrix
from rl_cluster_benchmark.tools.benchmark.removal import EVALUATIONS, log_of

CellState = Literal["to come", "training", "evaluating", "done", "failed"]
SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_FOR_AN_ORPHAN = 60.0  # that a run of a killed benchmark has to save and end
MOST_OVERHEAD = 600.0  # seconds to start and evaluate a cell
SPARE_SECONDS = 900.0  # beyond twice its duration, after which a timed run is ended


@dataclass
class CellProgress:
    """What is known about a cell."""

    cell: Cell
    directory: Path
    state: CellState = "to come"
    reason: str | None = None
    run: RunRecord | None = None
    seconds: float | None = None  # training and evaluation

    @property
    def log(self) -> Path:
        return log_of(self.directory)


def look_at(cell: Cell, directory: Path, matrix: Matrix) -> CellProgress:
    """Return what an earlier call has left of the cell; only what is complete counts."""
    run = _finished(directory)
    if run is None or _missing_levels(run, matrix):
        return CellProgress(cell, directory)
    return CellProgress(cell, directory, "done", None, run, _seconds_taken(run))


def _seconds_taken(run: RunRecord) -> float:
    """Return the time from the run's start to its last evaluation.

    An evaluation that was made much later, after an interruption, counts in part.
    """
    training = run.summary.duration_hours * 3600
    evaluated = max((file.stat().st_mtime for file in run.path.glob("evaluation_*.json")), default=0.0)
    return training + min(MOST_OVERHEAD, max(0.0, evaluated - (run.path / "config.yaml").stat().st_mtime - training))


def work_on(
    progress: CellProgress, matrix: Matrix, signals: Signals, look: Callable[[], None], keep_partial: bool
) -> None:
    """Train, unless that is done; evaluate, as far as that is not. Leaves the cell done, failed or to come."""
    started = time.monotonic()
    try:
        _wait_for_orphan(progress, signals)
        run = _finished(progress.directory)
        if run is None:
            progress.state = "training"
            run = _train(progress, matrix, signals, look, keep_partial)
        progress.state, progress.run = "evaluating", run
        for levels in _missing_levels(run, matrix):
            _evaluate(progress, run, levels, matrix, signals, look)
        progress.run = load_run(progress.directory, EVALUATIONS)
        progress.state, progress.reason = "done", None
    except _Interrupted:
        progress.state = "to come"
    except (_Failed, UnusableRunError) as error:
        progress.state, progress.reason = "failed", str(error)
    finally:
        progress.seconds = time.monotonic() - started
        if progress.state == "done" and progress.run is not None:  # it may have been trained by an earlier call
            progress.seconds = max(progress.seconds, _seconds_taken(progress.run))


class _Interrupted(Exception):  # noqa: N818
    pass


class _Failed(Exception):  # noqa: N818
    pass


def _train(
    progress: CellProgress, matrix: Matrix, signals: Signals, look: Callable[[], None], keep_partial: bool
) -> RunRecord:
    """Train the cell from the beginning, unless partial runs are to be kept.

    A resumed run meets other levels than a whole one.
    """
    how = "--resume-if-present" if keep_partial else "--overwrite"
    call = ["train", *progress.cell.arguments, "--output-dir", str(progress.directory), how]
    hours = matrix.duration_hours
    _call(progress, call, signals, look, deadline=2 * hours * 3600 + SPARE_SECONDS if hours else None)
    run = _finished(progress.directory)
    if run is None:
        raise _Failed("the run did not finish")
    return run


def _evaluate(
    progress: CellProgress, run: RunRecord, levels: str, matrix: Matrix, signals: Signals, look: Callable[[], None]
) -> None:
    directory = RunDirectory.of(run.config.model_copy(update={"output_dir": str(progress.directory)}))
    call = ["evaluate", "--checkpoint", str(directory.final_checkpoint()), "--levels", levels]
    call += ["--num-episodes", str(matrix.episodes), "--json", str(progress.directory / f"evaluation_{levels}.json")]
    (progress.directory / f"evaluation_{levels}.json").unlink(missing_ok=True)  # a damaged one would not be replaced
    if matrix.deterministic:
        call.append("--deterministic")
    if levels != "train" and run.config.env.game is not None:
        call += ["--video", str(progress.directory / "clip.webp")]
    _call(progress, call, signals, look)


def _call(
    progress: CellProgress, call: list[str], signals: Signals, look: Callable[[], None], deadline: float | None = None
) -> None:
    """Run `rlcb CALL` to its end; it is told to end earlier when a signal has come, or after `deadline` seconds."""
    child, is_late = ChildProcess(rlcb(*call), output=progress.log), False
    try:
        while not child.has_ended():
            is_late = is_late or (deadline is not None and time.monotonic() - child.started > deadline)
            if signals.has_come() or is_late:
                child.ask_to_end()
            look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        child.kill()
    if signals.has_come():
        raise _Interrupted
    if is_late:
        raise _Failed("the run was ended: it had taken more than twice its time")
    if child.status != 0:
        raise _Failed(reason_of_failure(progress.log, child.status, child.output_begins))


def _finished(directory: Path) -> RunRecord | None:
    try:
        run = load_run(directory, EVALUATIONS)
    except UnusableRunError:
        return None
    return run if run.state == "finished" else None


def _missing_levels(run: RunRecord, matrix: Matrix) -> list[str]:
    """Return the levels still to be played: those of training and unseen ones, or all where none was held back.

    An evaluation counts if it is known to be of the checkpoint that the run ended with.
    """
    held_back = run.config.env.game is not None and run.config.env.num_levels > 0
    wanted = ["train", "test"] if held_back else ["all"]
    found = run.evaluations
    return [
        levels
        for levels in wanted
        if levels not in found
        or found[levels].origin is None
        or found[levels].num_episodes != matrix.episodes
        or found[levels].deterministic != matrix.deterministic
    ]


def _wait_for_orphan(progress: CellProgress, signals: Signals) -> None:
    """Wait for the end of a run that a killed benchmark has left; it was told to end."""
    end = time.monotonic() + SECONDS_FOR_AN_ORPHAN
    while is_running(progress.directory):
        if signals.has_come():
            raise _Interrupted
        if time.monotonic() > end:
            raise _Failed("another process is training it")
        time.sleep(0.2)
