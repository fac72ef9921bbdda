"""The course of a benchmark: cell by cell, whatever an earlier call has finished left out; at the end, the report."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rl_cluster_benchmark.analysis.comparison import Comparison
from rl_cluster_benchmark.analysis.report import write_report
from rl_cluster_benchmark.analysis.runs import LeftOut, load_runs
from rl_cluster_benchmark.analysis.tables import as_table
from rl_cluster_benchmark.benchmark import matrix as matrices
from rl_cluster_benchmark.benchmark.board import Board
from rl_cluster_benchmark.benchmark.cells import Progress, look_at, work_on
from rl_cluster_benchmark.benchmark.matrix import Matrix
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.stop import Signals

CELLS = "cells"


def prepare(directory: Path, matrix: Matrix | None, *, resume: bool, overwrite: bool) -> Matrix:
    """The matrix to work on: the one in the directory, or a new one, written there."""
    exists = (directory / matrices.FILE).is_file()
    if resume and exists:
        saved = matrices.load(directory)
        if matrix is not None and matrix != saved:
            raise UserError(
                f"{directory} holds another benchmark ({directory / matrices.FILE}); "
                "leave the other options out to resume it, or choose another --output-dir."
            )
        return saved
    if matrix is None:
        raise UserError(f"There is no benchmark in {directory} to resume.")
    if exists and not overwrite:
        raise UserError(
            f"{directory} already holds a benchmark. Add --resume to go on with it, --overwrite to replace it, "
            "or choose another --output-dir."
        )
    if exists:
        shutil.rmtree(directory / CELLS, ignore_errors=True)
    try:
        (directory / CELLS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write to {directory} ({error.strerror}); choose another --output-dir.") from None
    matrices.save(matrix, directory)
    return matrix


def plan(directory: Path, matrix: Matrix) -> int:
    """Print the cells and how a cluster works on them, one job each."""
    cells = matrix.cells()
    for number, cell in enumerate(cells):
        print(f"{number:>4}  {cell.name:<40} rlcb train {shlex.join(cell.arguments)}")
    here = f"rlcb benchmark --resume --output-dir {shlex.quote(str(directory))}"
    print(f"\n{len(cells)} cells. One after the other, then the report:\n  {here}")
    print(f"One cell in a job of its own, for example on Slurm; when all have ended, the line above makes the report:\n"
          f"  sbatch --array=0-{len(cells) - 1} --wrap '{here} --cell $SLURM_ARRAY_TASK_ID'")  # fmt: skip
    return 0


def benchmark(
    directory: Path, matrix: Matrix, signals: Signals, *, only: str | None = None, keep_partial: bool = False
) -> int:
    """Work on every cell that is not done; returns the exit status."""
    cells = matrix.cells()
    all_cells = [look_at(cell, directory / CELLS / cell.name, matrix) for cell in cells]
    mine = all_cells if only is None else [all_cells[_index(only, [cell.name for cell in cells])]]
    (directory / CELLS).mkdir(parents=True, exist_ok=True)
    with _locked(directory / ".benchmark.lock") if only is None else contextlib.nullcontext():
        board = Board(mine, matrix)
        for progress in mine:
            if progress.state != "done" and signals.received is None:
                board.begin()
                work_on(progress, matrix, signals, board.show, keep_partial)
        board.end()
        if signals.received is not None:
            print(f"Interrupted. To go on: rlcb benchmark --resume --output-dir {shlex.quote(str(directory))}")
            return 128 + signals.received
        if only is None:
            report(directory, all_cells)
    failed = [progress for progress in mine if progress.state == "failed"]
    for progress in failed:
        print(f"Failed: {progress.cell.name}: {progress.reason}")
    return 1 if failed else 0


def report(directory: Path, cells: Sequence[Progress]) -> None:
    """The table on the screen; the page, its Markdown and the figures in files."""
    runs, left_out = load_runs([progress.directory for progress in cells if progress.state == "done"])
    left_out += [LeftOut(p.directory, p.reason or p.state) for p in cells if p.state != "done"]
    if not runs:
        return
    comparison = Comparison.of(runs, left_out)
    print(f"\n{as_table(comparison)}\n")
    for file in write_report(comparison, directory, title="Benchmark"):
        print(f"Saved {file}")


def _index(only: str, names: list[str]) -> int:
    if only in names:
        return names.index(only)
    if only.isdigit() and int(only) < len(names):
        return int(only)
    raise UserError(f"--cell {only}: there is no such cell; --plan lists them (0 to {len(names) - 1}, or their names).")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is working on the benchmark in {path.parent}.") from None
        yield
    finally:
        os.close(lock)


Check = Callable[[Sequence[str]], object]


def check_cells(matrix: Matrix, check: Check) -> None:
    """Every cell's config is built before anything starts: a mistake is found now, not after hours."""
    for cell in matrix.cells():
        try:
            check(cell.arguments)
        except UserError as error:
            raise UserError(f"{cell.name}: {error}") from None
