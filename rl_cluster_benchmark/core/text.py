"""Figures and tables as text, for screens and Markdown."""

from __future__ import annotations

import csv
import datetime
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "-"

Row = Sequence[str]


def plain(text: str) -> str:
    """Replace control characters by "?": names of runs may come from strangers and must not drive a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def whole(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def decimal(value: float | None, places: int = 2) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:,.{places}f}"


def duration(seconds: float | None) -> str:
    """Format seconds for people: 90 becomes 1m 30s."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def timestamp() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the keys of the first row, and a line with the values of each."""
    output = io.StringIO()
    writer = csv.DictWriter(output, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def table(head: Row, rows: Sequence[Row]) -> list[str]:
    """Format a table as lines, with columns as wide as their content and figures aligned to the right."""
    body = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *body]) for i in range(len(head))]
    numeric = [i > 0 and all(_is_figure(row[i]) for row in body) for i in range(len(head))]

    def line(row: Row) -> str:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [line(head), rule, *map(line, body)]


def markdown_table(head: Row, rows: Sequence[Row]) -> list[str]:
    def line(row: Row) -> str:
        return "| " + " | ".join(escape_markdown(cell) for cell in row) + " |"

    return [line(head), "|" + "-|" * len(head), *map(line, rows)]


def escape_markdown(text: str) -> str:
    """Escape a text so that a Markdown cell shows it as it is: no markup, no HTML, no end of the cell."""
    text = plain(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "|`*_[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _is_figure(text: str) -> bool:
    return text == NOTHING or text[:1].isdigit() or (text[:1] in "+-" and text[1:2].isdigit())
