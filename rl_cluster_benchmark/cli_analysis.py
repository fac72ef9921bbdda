"""The subcommands that look at runs: their arguments, and the one function that each of them calls."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from rl_cluster_benchmark.errors import UserError

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
    compare.add_argument("--sequential", metavar="DIR", help="a run in sequential mode, to compare with --parallel")
    compare.add_argument("--parallel", metavar="DIR", help="a run in another mode")
    compare.add_argument("--output", metavar="PNG", help="draw the curves (default with --sequential: comparison.png)")
    compare.add_argument(
        "--report", metavar="FILE", help="text report of --sequential and --parallel; default: comparison_report.txt"
    )
    compare.add_argument("--format", choices=FORMATS, default="table", help="default: table")
    compare.add_argument(
        "--x", choices=("steps", "time"), default="steps", help="axis of the plot: environment steps or wall-clock time"
    )
    compare.set_defaults(run=_compare)


def _add_run_arguments(parser: argparse.ArgumentParser, nargs: str) -> None:
    parser.add_argument("runs", metavar="RUN", nargs=nargs, help="directories of runs, or directories that hold runs")
    parser.add_argument("--unfinished", action="store_true", help="take in runs that are going on or were interrupted")
    parser.add_argument(
        "--threshold", type=float, metavar="REWARD",
        help="report the time to reach this mean reward; default: the highest that every group ended with",
    )  # fmt: skip


def _runs(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.analysis.listing import list_runs

    return list_runs(args.directory, as_json=args.format == "json")


def _compare(args: argparse.Namespace) -> int:
    x: Literal["step", "time"] = "step" if args.x == "steps" else "time"
    if args.sequential or args.parallel:
        if args.runs or not (args.sequential and args.parallel):
            raise UserError("Give --sequential DIR and --parallel DIR, or a list of runs, not a part of each.")
        from rl_cluster_benchmark.analysis.two_runs import compare_two

        return compare_two(
            Path(args.sequential),
            Path(args.parallel),
            output=Path(args.output or "comparison.png"),
            report=Path(args.report or "comparison_report.txt"),
            unfinished=args.unfinished,
            x=x,
        )
    if not args.runs:
        raise UserError("Nothing to compare: give the directories of runs, for example `rlcb compare benchmarks/*`.")
    from rl_cluster_benchmark.analysis.compare import compare

    return compare(
        [Path(run) for run in args.runs],
        output_format=args.format,
        plot=Path(args.output) if args.output else None,
        threshold=args.threshold,
        unfinished=args.unfinished,
        x=x,
    )
