"""The course of a benchmark: cell by cell, whatever an earlier call has finished left out; at the end, the report."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import cannot_write_to
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.run.directory import lock_file
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.runs import LeftOut, is_run, load_runs
from rl_cluster_benchmark.tools.benchmark import matrix as matrices
from rl_cluster_benchmark.tools.benchmark import removal
from rl_cluster_benchmark.tools.benchmark.cell_table import CellTable
from rl_cluster_benchmark.tools.benchmark.cells import CellProgress, look_at, work_on
from rl_cluster_benchmark.tools.benchmark.matrix import Matrix
from rl_cluster_benchmark.tools.reports.report import check_replaceable, write_report
from rl_cluster_benchmark.tools.reports.tables import as_table

CELLS = "cells"
LOCK_FILE = ".benchmark.lock"
SECONDS_FOR_THE_PLAN = 5.0  # that another job, which starts at the same time, may take to write it


def plan(directory: Path, matrix: Matrix | None, *, resume: bool, overwrite: bool) -> int:
    """Print the cells and how a cluster works on them, one job each; nothing that is there is removed or changed."""
    _check_can_resume(directory, matrix)
    exists = (directory / matrices.FILE).is_file()
    replaces = overwrite and matrix is not None and (exists or bool(_runs_of(directory, matrix)))
    if resume and exists:
        matrix = _saved(directory, matrix)
    elif matrix is None or not replaces:
        with _locked(directory):
            matrix = _prepare(directory, matrix, resume=resume, overwrite=False)
    cells = matrix.cells()
    for number, cell in enumerate(cells):
        print(f"{number:>4}  {cell.name:<40} rlcb train {shlex.join(cell.arguments)}")
    if replaces:
        goes = removal.what_goes(directory, _to_replace(directory, matrix))
        print(
            f"\n{directory} holds a benchmark, and --plan changes nothing. Without --plan, --overwrite removes: {goes}."
        )
        if _plan_in(directory) != matrix:
            print("For one cell in each job of a cluster choose another --output-dir.")
            return 0
    here = f"rlcb benchmark --resume --output-dir {shlex.quote(str(directory))}"
    print(f"\n{len(cells)} cells. One after the other, then the report:\n  {here}")
    print("One cell in a job of its own, for example on Slurm; when all have ended, the line above makes the report:")
    print(f"  sbatch --array=0-{len(cells) - 1} --wrap {shlex.quote(f'{here} --cell $SLURM_ARRAY_TASK_ID')}")
    return 0


def benchmark(
    directory: Path, matrix: Matrix | None, signals: Signals, *, resume: bool, overwrite: bool, keep_partial: bool
) -> int:
    """Work on every cell that is not done, then report; return the exit status."""
    _check_can_resume(directory, matrix)
    with _locked(directory):
        matrix = _prepare(directory, matrix, resume=resume, overwrite=overwrite)
        check_replaceable(directory)
        cells = _look_at_all(directory, matrix)
        status = _work(directory, cells, matrix, signals, keep_partial)
        if not signals.has_come():
            report(directory, cells)
    _name_failed(cells)
    return status


def one_cell(
    directory: Path, matrix: Matrix | None, signals: Signals, only: str, *, resume: bool, overwrite: bool,
    keep_partial: bool,
) -> int:  # fmt: skip
    """Work on one cell, beside jobs that work on others; return the exit status."""
    _check_can_resume(directory, matrix)
    if not (directory / matrices.FILE).is_file() or not (resume or overwrite):
        with _locked(directory, patience=SECONDS_FOR_THE_PLAN):
            _prepare(directory, matrix, resume=resume or overwrite, overwrite=False, only=only if overwrite else None)
    with _locked(directory, shared=True, patience=SECONDS_FOR_THE_PLAN):
        matrix = _saved(directory, matrix)
        cell = matrix.cells()[_index(only, [cell.name for cell in matrix.cells()])]
        place = directory / CELLS / cell.name
        lock = lock_file(removal.lock_of(place))
        if lock is None:
            raise UserError(f"Another job is working on the cell {cell.name} of the benchmark in {directory}.")
        try:
            if overwrite and os.path.lexists(place):
                with removal.runs_locked([place]):
                    print(f"Removing the cell {cell.name}.", flush=True)
                    removal.remove_cells([place], keep_locks=True)
            cells = [look_at(cell, place, matrix)]
            status = _work(directory, cells, matrix, signals, keep_partial)
        finally:
            os.close(lock)
    _name_failed(cells)
    return status


def _check_can_resume(directory: Path, matrix: Matrix | None) -> None:
    """Refuse a directory without a benchmark before anything is made: it may be mistyped."""
    if matrix is None and not (directory / matrices.FILE).is_file():
        raise UserError(f"There is no benchmark in {directory} to resume.")


def _prepare(
    directory: Path, matrix: Matrix | None, *, resume: bool, overwrite: bool, only: str | None = None
) -> Matrix:
    """Return the matrix to work on: the one in the directory, or a new one, written there. The lock is held.

    How runs without a plan were trained is not known: they are not gone on with. `only` is the cell that will be
    replaced.
    """
    exists = (directory / matrices.FILE).is_file()
    if resume and exists:
        return _saved(directory, matrix)
    if matrix is None:
        raise UserError(f"There is no benchmark in {directory} to resume.")
    names = [cell.name for cell in matrix.cells()]
    replaced = names[_index(only, names)] if only is not None else None
    if not exists and not overwrite and any(run.name != replaced for run in _runs_of(directory, matrix)):
        raise UserError(
            f"{directory} holds runs of a benchmark, but no {matrices.FILE} that says how they were trained. Add "
            "--overwrite (without --cell) to replace them, or choose another --output-dir."
        )
    if exists and not overwrite:
        raise UserError(
            f"{directory} already holds a benchmark. Add --resume to go on with it, --overwrite to replace it, "
            "or choose another --output-dir."
        )
    check_replaceable(directory)
    if overwrite:
        _remove(directory, matrix)
    try:
        (directory / CELLS).mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write_to(directory, error) from None
    matrices.save(matrix, directory)
    return matrix


def _saved(directory: Path, matrix: Matrix | None) -> Matrix:
    saved = matrices.load(directory)
    if matrix is not None and matrix != saved:
        raise UserError(
            f"{directory} holds another benchmark ({directory / matrices.FILE}); "
            "leave the other options out to resume it, or choose another --output-dir."
        )
    return saved


def _remove(directory: Path, matrix: Matrix) -> None:
    """Remove the benchmark that is there, and whatever lies where the new one's cells will."""
    cells = _to_replace(directory, matrix)
    goes = removal.what_goes(directory, cells)  # whose lock is held seems to be running
    with removal.runs_locked(cells):
        print(f"Replacing the benchmark in {directory}. Removing {goes}.", flush=True)
        removal.remove_report(directory)
        removal.remove_cells(cells)


def _to_replace(directory: Path, matrix: Matrix) -> list[Path]:
    cells = _directories(directory, matrix)
    if (before := _plan_in(directory)) is not None:
        cells += _directories(directory, before)
    return list(dict.fromkeys(cells))


def _plan_in(directory: Path) -> Matrix | None:
    """Return the plan in the directory; None if there is none, or a damaged one."""
    with contextlib.suppress(UserError):
        return matrices.load(directory)
    return None


def _runs_of(directory: Path, matrix: Matrix) -> list[Path]:
    return [cell for cell in _directories(directory, matrix) if is_run(cell)]


def _directories(directory: Path, matrix: Matrix) -> list[Path]:
    return [directory / CELLS / cell.name for cell in matrix.cells()]


def _look_at_all(directory: Path, matrix: Matrix) -> list[CellProgress]:
    return [look_at(cell, directory / CELLS / cell.name, matrix) for cell in matrix.cells()]


def _work(directory: Path, cells: Sequence[CellProgress], matrix: Matrix, signals: Signals, keep_partial: bool) -> int:
    """Work on these cells, one after the other; return the exit status."""
    (directory / CELLS).mkdir(parents=True, exist_ok=True)
    table = CellTable(cells, matrix)
    for progress in cells:
        if progress.state != "done" and not signals.has_come():
            table.begin()
            work_on(progress, matrix, signals, table.show, keep_partial)
    table.end()
    if signals.has_come():
        print(f"Interrupted. To go on: rlcb benchmark --resume --output-dir {shlex.quote(str(directory))}")
        return signals.status
    return 1 if any(progress.state == "failed" for progress in cells) else 0


def _name_failed(cells: Sequence[CellProgress]) -> None:
    for progress in cells:
        if progress.state == "failed":
            print(f"Failed: {progress.cell.name}: {progress.reason}")


def report(directory: Path, cells: Sequence[CellProgress]) -> None:
    """Print the table, and write the page, its Markdown and the figures."""
    runs, left_out = load_runs(
        [progress.directory for progress in cells if progress.state == "done"], evaluations=removal.EVALUATIONS
    )
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
def _locked(directory: Path, *, shared: bool = False, patience: float = 0.0) -> Iterator[None]:
    """Hold the benchmark's lock: shared by jobs with --cell, alone for everything else."""
    path = directory / LOCK_FILE
    try:
        lock = lock_file(path, shared=shared, patience=patience)
        others = lock_file(path, shared=True) if lock is None and not shared else None
    except OSError as error:
        raise cannot_write_to(directory, error) from None
    if others is not None:
        os.close(others)
        raise UserError(
            f"Jobs with --cell are working on the benchmark in {directory}, and nothing was changed; wait until they "
            "have ended, or choose another --output-dir."
        )
    if lock is None:
        raise UserError(
            f"Another process is working on the benchmark in {directory}, and nothing was changed; wait until it has "
            "ended, or choose another --output-dir."
        )
    try:
        yield
    finally:
        os.close(lock)


Check = Callable[[Sequence[str]], object]


def check_cells(matrix: Matrix, check: Check) -> None:
    """Build every cell's config before anything starts: a mistake is found now, not after hours."""
    for cell in matrix.cells():
        try:
            check(cell.arguments)
        except UserError as error:
            raise UserError(f"{cell.name}: {error}") from None
