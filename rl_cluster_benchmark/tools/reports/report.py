"""The report: a page that needs no network, the same in Markdown, the curves as PNG, the figures as CSV and JSON."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.output_files import MARK_OF_PLOTS, cannot_write_to, check_own
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.verdicts import headline
from rl_cluster_benchmark.tools.reports import report_data, tables
from rl_cluster_benchmark.tools.reports.comparison_plot import plot_comparison
from rl_cluster_benchmark.tools.reports.report_runs import commands
from rl_cluster_benchmark.tools.reports.template import as_template

WEB = Path(__file__).with_name("web")
FILES = {  # of a report -> what no other file of this name has in it
    "report.html": b'<meta name="generator" content="rlcb',
    "report.md": b"Written by rlcb",
    "comparison.csv": b"final_reward_low",
    "comparison.json": b"probability_of_improvement",
    "benchmark_results.txt": b"BENCHMARK RESULTS - ",
    "comparison.png": MARK_OF_PLOTS,
}


def check_replaceable(directory: Path) -> None:
    """Refuse a directory where the report would replace a file that this program has not written."""
    for name, mark in FILES.items():
        check_own(directory / name, mark, "choose another --output-dir")


def write_report(comparison: Comparison, directory: Path, title: str) -> list[Path]:
    """Write all files of the report; return them, the page first."""
    check_replaceable(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write_to(directory, error) from None
    contents = {
        "report.html": html(comparison, title),
        "report.md": markdown(comparison, title),
        "comparison.csv": tables.as_csv(comparison) + "\n",
        "comparison.json": tables.as_json(comparison) + "\n",
        "benchmark_results.txt": as_template(comparison) + "\n",
    }
    for name, content in contents.items():
        try:
            write_atomically(directory / name, content.encode(errors="backslashreplace"))
        except TrainingFailedError:
            raise UserError(f"Cannot write {directory / name}; choose another --output-dir.") from None
    plot = plot_comparison(comparison, directory / "comparison.png")
    return [*(directory / name for name in contents), plot]


def html(comparison: Comparison, title: str) -> str:
    """Return the page: the template escapes every value, and allows no script but its own and no network."""
    scripts = {"charts_js": source("charts.js"), "report_js": source("report.js")}
    page = templates().get_template("report.html")
    return page.render(
        **report_data.page(comparison, title),
        **{name: Markup(content) for name, content in scripts.items()},
        css=Markup(source("style.css")),
        data=script_json(report_data.chart_data(comparison)),
        script_hashes=Markup(script_hashes(list(scripts.values()))),
        version=__version__,
        date=datetime.date.today().isoformat(),
    )


def templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(WEB), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )


def script_json(data: object) -> Markup:
    """Return JSON for a script element: nothing in it can end the element."""
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        content = content.replace(character, f"\\u{ord(character):04x}")
    return Markup(content)


def script_hashes(scripts: Sequence[str]) -> str:
    """Return the hashes of these scripts for the page's content security policy."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def source(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def markdown(comparison: Comparison, title: str) -> str:
    escape = text.escape_markdown
    lines = [f"# {escape(title)}", "", escape(report_data.machine(comparison)) + "  "]
    lines += [escape(report_data.extent(comparison)), ""]
    lines += [f"**{escape(sentence)}**  " for sentence in headline(comparison)]
    notes = comparison.warnings()
    lines += ["", *(f"- {escape(note)}" for note in notes), *([""] if notes else [])]
    lines += ["![curves](comparison.png)", "", "## Results", "", *tables.markdown_tables(comparison)]
    lines += ["## Where the time goes", "", *_phase_table(comparison), "", "## Every run, and how to repeat it", ""]
    for group in comparison.groups:
        for run in group.runs:
            lines += [f"{escape(f'{group.variant}, {run.game}, seed {run.seed}, {run.state}')}:", ""]
            lines += [f"    {text.plain(command)}" for command in commands(run)]
            lines.append("")
    if comparison.left_out:
        lines += ["## Left out", "", *(f"- {escape(str(item))}" for item in comparison.left_out), ""]
    lines.append(f"Written by rlcb {__version__} on {datetime.date.today().isoformat()}.")
    return "\n".join(lines) + "\n"


def _phase_table(comparison: Comparison) -> list[str]:
    bars = report_data.page_phases(comparison)
    if not bars or not bars[0]["parts"]:
        return []
    head = ["run", *(part["name"] for part in bars[0]["parts"])]
    return text.markdown_table(head, [[bar["name"], *(part["text"] for part in bar["parts"])] for bar in bars])
