"""The subcommands that look at runs and checkpoints, and `rlcb benchmark`, which makes runs to look at."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from rl_cluster_benchmark.cli.arguments import start_signals
from rl_cluster_benchmark.core.errors import UserError

if TYPE_CHECKING:
    from rl_cluster_benchmark.tools.benchmark.matrix import Matrix


def runs(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.reports.listing import list_runs

    return list_runs(args.directory, as_json=args.format == "json")


def compare(args: argparse.Namespace) -> int:
    x: Literal["step", "time"] = "step" if args.x == "steps" else "time"
    if args.sequential or args.parallel:
        if args.runs or not (args.sequential and args.parallel):
            raise UserError("Give --sequential DIR and --parallel DIR, or a list of runs, not a part of each.")
        from rl_cluster_benchmark.tools.reports.two_runs import compare_two

        return compare_two(
            args.sequential,
            args.parallel,
            output=args.output,
            report=args.report,
            unfinished=args.unfinished,
            x=x,
        )
    if not args.runs:
        raise UserError("Nothing to compare: give the directories of runs, for example `rlcb compare benchmarks/*`.")
    from rl_cluster_benchmark.tools.reports.compare import compare

    return compare(
        args.runs,
        output_format=args.format,
        plot=args.output,
        threshold=args.threshold,
        unfinished=args.unfinished,
        x=x,
    )


def report(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.analysis.comparison import Comparison
    from rl_cluster_benchmark.tools.reports.report import check_replaceable, write_report

    check_replaceable(args.output_dir)
    comparison = Comparison.load(args.runs, unfinished=args.unfinished, threshold=args.threshold)
    for item in comparison.left_out:
        print(f"Left out: {item}")
    for file in write_report(comparison, args.output_dir, title=args.title):
        print(f"Saved {file}")
    return 0


def dashboard(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.dashboard.server import serve

    return serve(args.directory, args.port)


def benchmark(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.benchmark import benchmark as benchmarks

    signals, directory = start_signals(), args.output_dir
    matrix = _matrix(args)
    if matrix is not None:
        benchmarks.check_cells(matrix, args.parse_train)
    how = {"resume": args.resume, "overwrite": args.overwrite}
    if args.plan:
        return benchmarks.plan(directory, matrix, **how)
    if args.cell is not None:
        return benchmarks.one_cell(directory, matrix, signals, args.cell, **how, keep_partial=args.keep_partial)
    return benchmarks.benchmark(directory, matrix, signals, **how, keep_partial=args.keep_partial)


def _matrix(args: argparse.Namespace) -> Matrix | None:
    """Return what the command line asks for; None if it says nothing about it, as when an old benchmark is resumed."""
    from typing import get_args

    from rl_cluster_benchmark.config.config_files import find_config
    from rl_cluster_benchmark.config.schema import Algorithm
    from rl_cluster_benchmark.tools.benchmark.matrix import build

    given = (
        args.algorithms, args.modes, args.configs, args.games, args.seeds, args.duration, args.total_timesteps,
        args.episodes, args.set,
    )  # fmt: skip
    if args.resume and all(value is None for value in given) and not args.deterministic:
        return None
    if args.configs and (args.algorithms or args.modes):
        raise UserError("Give either --configs or --algorithms and --modes: a config names its own.")
    by_name = not args.configs
    return build(
        algorithms=args.algorithms or (list(get_args(Algorithm)) if by_name else []),
        modes=args.modes or (["sequential", "parallel"] if by_name else []),
        configs=[str(find_config(file).resolve()) for file in args.configs or ()],
        games=args.games or ["coinrun"],
        seeds=args.seeds or [1, 2, 3],
        duration_hours=args.duration,
        total_timesteps=args.total_timesteps,
        episodes=100 if args.episodes is None else args.episodes,
        deterministic=args.deterministic,
        settings=args.set or [],
    )


def plot(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.reports.plots import plot_metrics

    print(f"Saved {plot_metrics(args.log_file, args.output)}")
    return 0


def inspect(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.inspection import inspect

    return inspect(args.file, as_json=args.json)


def verify(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.inspection import verify

    return verify(args.paths)
