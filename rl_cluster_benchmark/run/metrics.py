"""The time series of a run: a line of JSON and a TensorBoard point per log interval, both over environment steps."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.core.atomic_files import cannot_write, write_atomically, write_json
from rl_cluster_benchmark.core.errors import UserError

MAX_LINE = 65_536
KEYS = ("step", "time", "update")  # of each line; all others are scalars named as in CleanRL


class MetricsWriter:
    def __init__(self, path: Path, *, tensorboard: bool, resumed_at: int | None) -> None:
        self.path = path
        self._tensorboard: Any = None
        try:
            self._file = path.open("a", encoding="utf-8")
            if tensorboard:
                # TensorBoard drops what an interrupted run wrote after the checkpoint that this one starts from.
                purge = resumed_at + 1 if resumed_at is not None else None
                self._tensorboard = summary_writer()(str(path.parent), purge_step=purge)
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, line: dict[str, float]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                for name, value in line.items():
                    if name not in KEYS:
                        self._tensorboard.add_scalar(name, value, global_step=line["step"])
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def flush(self) -> None:
        """Make what was written last through a power failure: no checkpoint is to be newer than the log."""
        try:
            os.fsync(self._file.fileno())
            if self._tensorboard is not None:
                self._tensorboard.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Every line was flushed when it was written: what cannot be written now was reported then."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            if self._tensorboard is not None:
                self._tensorboard.close()


def summary_writer() -> Any:
    """Return TensorBoard's class; it is imported when it is needed, for it takes a second."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "tensorboard is not installed: pip install tensorboard, or --set logging.tensorboard=false."
        ) from None
    threading.excepthook = _but_for_tensorboard
    return SummaryWriter


def _but_for_tensorboard(args: threading.ExceptHookArgs) -> None:
    """Its thread cannot write: the next call of the writer says so, once, in our words."""
    if type(args.thread).__name__ != "_AsyncWriterThread" or not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


def read_lines(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; one cut short by a crash is left out."""
    lines = []
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE):
                parsed = _parse(line)
                if parsed is not None:
                    lines.append(parsed)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    return lines


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(parsed, dict) and all(type(parsed.get(key)) in (int, float) for key in KEYS)
    return parsed if is_line else None


def cut_after(path: Path, update: int) -> None:
    """Drop the lines of updates that are about to be made again."""
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["update"] <= update]
        write_atomically(path, "".join(kept).encode())


def write_columns(path: Path, lines: Iterable[dict[str, float]]) -> None:
    """metrics.json: one list per metric, all of the same length."""
    rows = list(lines)
    names = list(dict.fromkeys(name for row in rows for name in row))
    write_json(path, {name: [row.get(name) for row in rows] for name in names})


class Asynchrony:
    """Sums up over a whole run how far apart those who act and those who learn were.

    Of each metric the mean over the updates; of one called `_max` the largest; of a count (system/) the last.
    A share of the time since the start (`_idle`) is also taken as it was last.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.waits: dict[str, list[float]] = {}  # role -> seconds waited and seconds lived, of all its processes

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            before = self._sums.get(name, 0.0)
            if name.endswith("_max"):
                self._sums[name], self._counts[name] = max(before, value), 1
            elif name.startswith("system/") or name.endswith("_idle"):
                self._sums[name], self._counts[name] = value, 1
            else:
                self._sums[name], self._counts[name] = before + value, self._counts.get(name, 0) + 1

    def summary(self) -> dict[str, float]:
        return {name.rpartition("/")[2]: total / self._counts[name] for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts), "waits": dict(self.waits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        self.waits = dict(state.get("waits", {}))
