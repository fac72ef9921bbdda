"""The subcommands that look at runs and checkpoints: their arguments, and the one function that each of them calls."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_cluster_benchmark.cli.arguments import finite, port, positive, seed, start_signals, steps
from rl_cluster_benchmark.core.errors import UserError

if TYPE_CHECKING:
    from rl_cluster_benchmark.tools.benchmark.matrix import Matrix

FORMATS = ("table", "csv", "json", "markdown", "template")


def add_analysis_commands(commands: Any) -> None:
    runs = commands.add_parser(
        "runs",
        help="list the runs in a directory",
        description="List the runs in a directory: algorithm, mode, game, steps, speed, reward, and whether each is "
        "running, finished, interrupted or failed, and why.",
    )
    runs.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current directory")
    runs.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    runs.set_defaults(run=_runs)

    compare = commands.add_parser(
        "compare",
        help="compare runs",
        description="Compare any number of runs, grouped by algorithm, mode, settings and game, seeds aggregated; or, "
        "with --sequential and --parallel, two runs as a table, a four-panel plot and comparison_report.txt.",
        allow_abbrev=False,
    )
    _add_run_arguments(compare, nargs="*")
    compare.add_argument(
        "--sequential", type=Path, metavar="DIR", help="a run in sequential mode, to compare with --parallel"
    )
    compare.add_argument("--parallel", type=Path, metavar="DIR", help="a run in another mode")
    compare.add_argument(
        "--output", type=Path, metavar="PNG", help="draw the curves (default with --sequential: comparison.png)"
    )
    compare.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="text report of --sequential and --parallel; default: comparison_report.txt",
    )
    compare.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    compare.add_argument(
        "--x", choices=("steps", "time"), default="steps", help="axis of the plot: environment steps or wall-clock time"
    )
    compare.set_defaults(run=_compare)

    _add_report_command(commands)
    _add_benchmark_command(commands)

    dashboard = commands.add_parser(
        "dashboard",
        help="watch runs in the browser",
        description="Serve a live page about the runs in a directory: curves, speed, phases, cores, workers, memory. "
        "Read-only, on this machine only (127.0.0.1).",
    )
    dashboard.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current directory")
    dashboard.add_argument("--port", type=port, default=6007, metavar="N", help="default: 6007; 0 takes a free one")
    dashboard.set_defaults(run=_dashboard)


def _add_report_command(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write a page about runs",
        description="Write report.html, one file that needs no network, and report.md: headline, tables, curves, "
        "phases, evaluation, clips, configs and the command that repeats each run.",
        allow_abbrev=False,
    )
    _add_run_arguments(report, nargs="+")
    report.add_argument(
        "--output-dir", type=Path, metavar="DIR", default=".", help="where to; default: the current directory"
    )
    report.add_argument("--title", metavar="TEXT", default="Comparison of runs", help="heading of the page")
    report.set_defaults(run=_report)


def _add_benchmark_command(commands: Any) -> None:
    parser = commands.add_parser(
        "benchmark",
        help="train, evaluate and compare a whole matrix",
        description="Train every combination of algorithms, modes, games and seeds, one after the other; evaluate each "
        "agent on training and on unseen levels; write the report. --resume goes on after an interruption.",
        allow_abbrev=False,
    )
    parser.add_argument("--algorithms", nargs="+", type=str.lower, metavar="NAME", help="default: all there are")
    parser.add_argument("--modes", nargs="+", type=str.lower, metavar="MODE", help="default: sequential parallel")
    parser.add_argument(
        "--configs", nargs="+", metavar="FILE", help="config files or presets instead of algorithms x modes"
    )
    parser.add_argument("--games", nargs="+", metavar="GAME", help="default: coinrun")
    parser.add_argument("--seeds", nargs="+", type=seed, metavar="N", help="default: 1 2 3")
    parser.add_argument("--duration", type=finite, metavar="HOURS", help="train each cell for this long")
    parser.add_argument("--total-timesteps", type=steps, metavar="N", help="or for this many environment steps")
    parser.add_argument("--episodes", type=positive, metavar="N", help="episodes of each evaluation; default: 100")
    parser.add_argument("--deterministic", action="store_true", help="evaluate with the likeliest action")
    parser.add_argument("--set", nargs="+", action="extend", metavar="KEY=VALUE", help="settings of every cell")
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", default="benchmarks/matrix", help="default: benchmarks/matrix"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true", help="go on with the benchmark in the output directory")
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the benchmark in the output directory (with --cell: that cell)",
    )
    parser.add_argument(
        "--keep-partial", action="store_true",
        help="go on within an interrupted cell instead of training it anew (its levels then differ from a whole run's)",
    )  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="only write the plan, and print the cells")
    parser.add_argument("--cell", metavar="N", help="only this cell (number or name): a job of its own on a cluster")
    parser.set_defaults(run=_benchmark)


def _add_run_arguments(parser: argparse.ArgumentParser, nargs: str) -> None:
    parser.add_argument(
        "runs", type=Path, metavar="RUN", nargs=nargs, help="directories of runs, or directories that hold runs"
    )
    parser.add_argument("--unfinished", action="store_true", help="take in runs that are going on or were interrupted")
    parser.add_argument(
        "--threshold", type=finite, metavar="REWARD",
        help="report the time to reach this mean reward; default: the highest that every group ended with",
    )  # fmt: skip


def _runs(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.reports.listing import list_runs

    return list_runs(args.directory, as_json=args.format == "json")


def _compare(args: argparse.Namespace) -> int:
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


def _report(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.analysis.comparison import Comparison
    from rl_cluster_benchmark.tools.reports.report import check_replaceable, write_report

    check_replaceable(args.output_dir)
    comparison = Comparison.load(args.runs, unfinished=args.unfinished, threshold=args.threshold)
    for item in comparison.left_out:
        print(f"Left out: {item}")
    for file in write_report(comparison, args.output_dir, title=args.title):
        print(f"Saved {file}")
    return 0


def _dashboard(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.dashboard.server import serve

    return serve(args.directory, args.port)


def _benchmark(args: argparse.Namespace) -> int:
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


def add_checkpoint_command(commands: Any) -> None:
    checkpoint = commands.add_parser(
        "checkpoint",
        help="look into checkpoints: inspect, verify",
        description="Look into checkpoints. Reading one runs no code that may be in it.",
    )
    actions = checkpoint.add_subparsers(title="actions", metavar="ACTION", required=True)
    inspect = actions.add_parser("inspect", help="what is in a checkpoint", description="Say what is in a checkpoint.")
    inspect.add_argument("file", type=Path, metavar="FILE", help="a checkpoint")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    inspect.set_defaults(run=_inspect)
    verify = actions.add_parser(
        "verify",
        help="check that checkpoints are whole",
        description="Check checksum, format and content of checkpoints; status 1 if one of them is not good.",
    )
    verify.add_argument(
        "paths", type=Path, metavar="PATH", nargs="+", help="checkpoints, or directories that hold some"
    )
    verify.set_defaults(run=_verify)


def _inspect(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.inspection import inspect

    return inspect(args.file, as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.inspection import verify

    return verify(args.paths)
