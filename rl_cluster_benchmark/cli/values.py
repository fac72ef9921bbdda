"""The kinds of values that command-line arguments have."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rl_cluster_benchmark.tools.launch import names

MAX_COUNT, MAX_DIGITS = 10**9, 40
MOST = 1e12  # of any unit of bandwidth or time


def whole(lowest: int, highest: int = MAX_COUNT) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number in this range."""

    def parse(text: str) -> int:
        digits = text.replace("_", "")
        number = int(digits) if digits.isdecimal() and len(digits) <= MAX_DIGITS else -1
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(
                f"{text[:MAX_DIGITS]} is not allowed; it must be a whole number of at least {lowest}, at most {highest}"
            )
        return number

    return parse


def number(is_allowed: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """Return the type of an argument that is a number; `words` say which ones are allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"{text[:MAX_DIGITS]} is not allowed; it must be {words}")
        return value

    return parse


positive = whole(1)


def numbers(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def machines(text: str) -> list[int]:
    """Return numbers of machines, 1 always among them."""
    numbers = text.replace(" ", "").split(",")
    if not all(number.isdecimal() and len(number) < 8 and 1 <= int(number) <= 1_000_000 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not allowed; write numbers of machines as 1,2,4")
    return sorted({1, *map(int, numbers)})


def with_unit(units: Mapping[str, float], examples: str) -> Callable[[str], float]:
    """Return the type of an argument that is a number with one of these units; it is given in the base unit."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.lower())
        if match is None or match.group(2) not in units or not 0 < float(match.group(1)) <= MOST:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not understood; write it as {examples}")
        return float(match.group(1)) * units[match.group(2)]

    return parse


TYPES: dict[str, Callable[[str], object]] = {  # by the names that commands.toml uses
    "path": Path,
    "lower": str.lower,
    "line": names.line,
    "variable": names.variable,
    "positive": positive,
    "rank": whole(0),
    "port": whole(0, 65_535),
    "steps": whole(1, 2**63 - 1),
    "seed": whole(0, 2**32 - 1),
    "finite": number(math.isfinite, "a finite number"),
    "seconds": number(lambda value: 0 < value <= 86_400, "a number of seconds, at most a day"),
    "waiting": number(lambda value: 2 <= value <= 3600, "a number of seconds from 2 to 3600"),
    "hours": number(lambda value: 0 < value <= 100_000, "a number of hours greater than 0"),
    "share": number(lambda value: 0 <= value < 1, "a number from 0 to 1, 0.03 is 3%"),
    "numbers": numbers,
    "nodes": machines,
    "rate": with_unit({"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}, "10gbit, 100mbit"),
    "time": with_unit({"s": 1.0, "ms": 1e-3, "us": 1e-6}, "0.1ms, 50us"),
}
