"""Reading metrics.jsonl back: whole while it is small, evenly sampled when it is large, never more than some megabytes.

A log may be cut short by a crash, still be growing, or come from a stranger: what is no line of numbers is left out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rl_cluster_benchmark.core.atomic_files import open_plain

Series = dict[str, NDArray[np.float64]]
"""Metric -> its values, all as long as "step"; NaN where a line does not have it."""

MAX_POINTS = 4000
WHOLE_BYTES = 8_000_000  # files up to this size are read whole
MAX_LINE = 65_536
MAX_METRICS = 100
MAX_NUMBER = 1e15  # no figure of a run is larger; a larger one spoils sums, pictures and pages
KEYS = ("step", "time", "update")
PREFIXES = ("charts/", "losses/", "time/", "system/")


def read_series(path: Path) -> Series:
    """Return the log as columns of at most MAX_POINTS numbers in order of steps; empty ones if it holds no line."""
    return columns(read_points(path))


def read_points(path: Path) -> list[dict[str, float]]:
    """Return the log's lines, or about MAX_POINTS of them at even distances, the first and the last among them."""
    with open_plain(path) as file:
        size = file.seek(0, 2)
        lines = _all_lines(file) if size <= WHOLE_BYTES else _sampled_lines(file, size)
    points: list[dict[str, float]] = []
    for line in lines:
        point = _parse(line)
        if point is not None and (not points or _place(point) > _place(points[-1])):
            points.append(point)
    return points


def _place(point: dict[str, float]) -> tuple[float, float]:
    """Return where a line stands in a log; an update of IMPALA that only replays has no new steps."""
    return point["step"], point["update"]


class GrowingLog:
    """The metrics.jsonl of a run that is going on, read as far as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_so_far = 0

    def new_lines(self) -> list[dict[str, float]]:
        """Return the lines that were written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_so_far)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # its first line is still to come
            return []
        self._read_so_far += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


def columns(points: list[dict[str, float]]) -> Series:
    names = list(dict.fromkeys([*KEYS, *(name for point in points for name in point)]))[:MAX_METRICS]
    return {name: np.array([point.get(name, math.nan) for point in points], dtype=np.float64) for name in names}


def _all_lines(file: BinaryIO) -> list[bytes]:
    file.seek(0)
    lines = file.read(WHOLE_BYTES).splitlines()
    stride = -(-len(lines) // MAX_POINTS) or 1
    return [*lines[:-2:stride], *lines[-2:]]  # of the last two, one may be cut short


def _sampled_lines(file: BinaryIO, size: int) -> list[bytes]:
    lines = []
    for index in range(MAX_POINTS):
        file.seek(size * index // MAX_POINTS)
        if index:
            file.readline(MAX_LINE)  # the rest of a line
        lines.append(file.readline(MAX_LINE))
    file.seek(size - MAX_LINE)
    return [*lines, *file.read(MAX_LINE).splitlines()[-2:]]


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    point = {}
    for name, value in content.items():
        if name in KEYS or name.startswith(PREFIXES):
            number = _number(value)
            if number is not None:
                point[name] = number
    return point if all(point.get(key, -1.0) >= 0 for key in KEYS) else None


def _number(value: object) -> float | None:
    """Return a number if it is finite and of a sensible size, or else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_NUMBER else None
