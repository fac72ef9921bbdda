"""`rlcb compare`: any number of runs, in any of the formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_cluster_benchmark.core.output_files import check_output
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.curves import Axis
from rl_cluster_benchmark.tools.reports import tables
from rl_cluster_benchmark.tools.reports.comparison_plot import plot_comparison
from rl_cluster_benchmark.tools.reports.plots import picture_file
from rl_cluster_benchmark.tools.reports.template import as_template

FORMATS: dict[str, Callable[[Comparison], str]] = {
    "table": tables.as_table,
    "markdown": tables.as_markdown,
    "csv": tables.as_csv,
    "json": tables.as_json,
    "template": as_template,
}


def compare(
    paths: Sequence[Path], *, output_format: str, plot: Path | None, threshold: float | None, unfinished: bool, x: Axis
) -> int:
    if plot is not None:
        plot = picture_file(plot)
        check_output("--output", plot)
    comparison = Comparison.load(paths, unfinished=unfinished, threshold=threshold)
    print(FORMATS[output_format](comparison))
    if output_format not in ("table", "markdown", "json"):  # those name them themselves
        for item in comparison.left_out:
            print(f"Left out: {item}", file=sys.stderr)
    if plot is not None:
        plot_comparison(comparison, plot, x)
        print(f"Plot saved to: {plot}", file=sys.stderr)
    return 0
