"""Runs as they lie on the disk, in whatever state: running, finished, interrupted, failed, or no run at all.

Nothing is written or locked for longer than a look, no path that a file names is followed, and no file is read that
lies outside the run's own directory: run directories may come from strangers.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError

from rl_cluster_benchmark import config_files as configs
from rl_cluster_benchmark.analysis.series import Series, columns, read_series
from rl_cluster_benchmark.analysis.text import plain
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.directory import ALGORITHM_NAMES, RunDirectory
from rl_cluster_benchmark.run.episodes import WINDOW

State = Literal["running", "finished", "interrupted", "failed"]
Number = Annotated[float, Field(allow_inf_nan=False)]

MARKS = ("config.yaml", "training_summary.json", "benchmark_metrics.json", "metrics.jsonl")
MAX_FILE = 1_000_000
MAX_DEPTH = 6
MAX_RUNS = 10_000
KILLED = "it ended without a summary: killed, or the machine went down"
RECENT = 10  # lines of the log that make up the final speed


class UnusableRunError(UserError):
    """A directory that holds no run that can be read; the message is the reason."""


class Summary(BaseModel):
    """training_summary.json, as far as it is used here."""

    state: Literal["finished", "interrupted", "failed"]
    reason: str | None = None
    total_timesteps: Number
    total_updates: Number
    duration_hours: Number
    avg_fps: Number
    final_fps: Number
    peak_memory_gb: Number
    initial_reward: Number | None = None
    initial_reward_std: Number | None = None
    final_reward: Number | None = None
    final_reward_std: Number | None = None
    best_reward: Number | None = None
    num_episodes: Number = 0
    num_workers: Annotated[int, Field(ge=1)] = 1
    phase_shares: dict[str, Number] = {}
    cpu_utilization: Number | None = None
    num_threads: int | None = None
    precision: str | None = None
    cpu_model: str | None = None
    usable_cores: int | None = None
    finished_at: str | None = None
    git_commit: str | None = None
    versions: dict[str, str] = {}


class Evaluation(BaseModel):
    """What `rlcb evaluate --json` writes."""

    mean_reward: Number
    std_reward: Number
    min_reward: Number
    max_reward: Number
    mean_length: Number
    std_length: Number
    num_episodes: Annotated[int, Field(ge=1)]
    ci95: tuple[Number, Number]
    normalized_score: Number | None = None
    levels: Literal["train", "test", "all"]
    seed: int = 0
    deterministic: bool = False
    env: str


@dataclass(frozen=True)
class RunRecord:
    path: Path
    config: Config
    state: State
    reason: str | None
    summary: Summary  # of the file, or made from the log while there is none
    series: Series
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # by levels

    @property
    def algorithm(self) -> str:
        return ALGORITHM_NAMES.get(self.config.algorithm, self.config.algorithm.upper())

    @property
    def mode(self) -> str:
        return self.config.mode

    @property
    def game(self) -> str:
        return self.config.env.game or self.config.env.name

    @property
    def seed(self) -> int:
        return self.config.env.seed

    @property
    def test_evaluation(self) -> Evaluation | None:
        """On levels never trained on, or on all levels, as the published test is."""
        return self.evaluations.get("test") or self.evaluations.get("all")


@dataclass(frozen=True)
class LeftOut:
    path: Path
    reason: str

    def __str__(self) -> str:
        return plain(f"{self.path}: {self.reason}")


def load_runs(paths: Iterable[Path], *, unfinished: bool = False) -> tuple[list[RunRecord], list[LeftOut]]:
    """The runs in these directories (or in those below them), and what was left out, with the reason."""
    runs: list[RunRecord] = []
    left_out: list[LeftOut] = []
    for path in dict.fromkeys(run for given in paths for run in _expand(given)):
        try:
            run = load_run(path)
            require_usable(run, unfinished)
            runs.append(run)
        except UnusableRunError as error:
            left_out.append(LeftOut(path, str(error)))
    return runs, left_out


def require_usable(run: RunRecord, unfinished: bool) -> None:
    if not len(run.series["step"]):
        raise UnusableRunError(f"{run.state}, no update is in its log")
    if run.state != "finished" and not unfinished:
        why = f" ({run.reason})" if run.reason else ""
        raise UnusableRunError(f"{run.state}{why}; --unfinished takes it in as it is")


def _expand(path: Path) -> list[Path]:
    if is_run(path):
        return [path]
    return list(find_runs(path)) or [path]


def is_run(path: Path) -> bool:
    is_starting = (path / ".lock").is_file() and (path / "checkpoints").is_dir()
    return is_starting or any((path / mark).is_file() for mark in MARKS)


def find_runs(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Directories that look like a run, in order of their names; links are not followed."""
    yield from itertools.islice(_walk(root, depth), MAX_RUNS)


def _walk(root: Path, depth: int) -> Iterator[Path]:
    if is_run(root):
        yield root
        return
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names if depth > 0 else ():
        yield from _walk(root / name, depth - 1)


def load_run(path: Path) -> RunRecord:
    if not path.exists():
        raise UnusableRunError("does not exist")
    if not path.is_dir():
        raise UnusableRunError("is a file, not the directory of a run")
    if not is_run(path):
        raise UnusableRunError("holds no run: none of " + ", ".join(MARKS) + " is in it")
    running = is_running(path)
    config = _load_config(path, running)
    series = _load_series(path, config)
    summary = _load_summary(path, config)
    last = series["update"][-1] if len(series["update"]) else 0
    if running or summary is None or summary.total_updates < last:
        current = _summary_of(series, "interrupted")
        state: State = "running" if running else "interrupted"
        return RunRecord(path, config, state, None if running else KILLED, current, series)
    return RunRecord(path, config, summary.state, summary.reason, summary, series, _load_evaluations(path, config))


def is_running(path: Path) -> bool:
    """Does a process hold the run's lock? A shared lock, tried for a moment, tells."""
    try:
        lock = os.open(path / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def read_inside(root: Path, file: Path, limit: int = MAX_FILE) -> bytes | None:
    """A file of the run, or None where there is none; one that is too large or leads outside is an error."""
    if not file.exists():
        return None
    if not file.resolve().is_relative_to(root.resolve()) or not file.is_file():
        raise UnusableRunError(f"{file.name} leads outside the run's directory, or is no plain file")
    try:
        with open(file, "rb") as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise UnusableRunError(f"{file.name} cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise UnusableRunError(f"{file.name} is larger than {limit:,} bytes: not written by this program")
    return content


class _PlainLoader(yaml.SafeLoader):
    """Without anchors: a few lines of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


def _load_config(path: Path, running: bool) -> Config:
    content = read_inside(path, path / "config.yaml")
    if content is None:
        if running:
            raise UnusableRunError("running, it has written nothing yet")
        raise UnusableRunError("has no config.yaml: from an older format, or never started")
    try:
        data = yaml.load(content, Loader=_PlainLoader)
        if not isinstance(data, dict):
            raise UserError("it holds no settings")
        return configs.build(data, {}, source="config.yaml")
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UnusableRunError("config.yaml is damaged") from None
    except UserError as error:
        sentence = str(error).splitlines()[0].removeprefix("config.yaml: ").rstrip(".")
        raise UnusableRunError(f"config.yaml is damaged or of an older format ({sentence[:200]})") from None


def _load_series(path: Path, config: Config) -> Series:
    label = RunDirectory.of(config.model_copy(update={"output_dir": "."})).logs
    for file in (path / label / "metrics.jsonl", path / "metrics.jsonl"):
        if file.exists():
            if not file.resolve().is_relative_to(path.resolve()) or not file.is_file():
                raise UnusableRunError("metrics.jsonl leads outside the run's directory, or is no plain file")
            try:
                series = read_series(file)
            except OSError as error:
                raise UnusableRunError(f"metrics.jsonl cannot be read ({error.strerror})") from None
            if not len(series["step"]) and file.stat().st_size > 1:
                raise UnusableRunError("metrics.jsonl is damaged: not one line of it can be read")
            return series
    return columns([])


def _load_summary(path: Path, config: Config) -> Summary | None:
    for name in ("training_summary.json", "benchmark_metrics.json"):
        content = read_inside(path, path / name)
        if content is None:
            continue
        try:
            data = json.loads(content)
            summary = Summary.model_validate(data)
        except (ValueError, RecursionError) as error:
            what = f" ({_first_problem(error)})" if isinstance(error, ValidationError) else ""
            raise UnusableRunError(f"{name} is damaged or of an older format{what}") from None
        if data.get("env") not in (None, config.env.name):
            raise UnusableRunError(f"{name} and config.yaml are of different runs")
        return summary
    return None


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"[:120]


def _load_evaluations(path: Path, config: Config) -> dict[str, Evaluation]:
    """By levels; of several on the same levels, the one with most episodes."""
    found: dict[str, Evaluation] = {}
    for file in sorted(path.glob("eval*.json")):
        try:
            evaluation = Evaluation.model_validate_json(read_inside(path, file) or b"")
        except (ValidationError, UnusableRunError):
            continue  # another program's file
        known = found.get(evaluation.levels)
        if evaluation.env == config.env.name and (known is None or known.num_episodes < evaluation.num_episodes):
            found[evaluation.levels] = evaluation
    return found


def _summary_of(series: Series, state: Literal["interrupted"]) -> Summary:
    """What the log alone tells about a run that has not written its summary, or not its last one."""
    if not len(series["step"]):
        return Summary(
            state=state, total_timesteps=0, total_updates=0, duration_hours=0, avg_fps=0, final_fps=0, peak_memory_gb=0
        )
    last = {name: float(values[-1]) for name, values in series.items() if values[-1] == values[-1]}
    rewards = series.get("charts/episodic_return", series["step"][:0])
    if len(rewards):
        rewards = rewards[(series.get("charts/episodes", rewards) >= WINDOW) & (rewards == rewards)]
    speeds = series.get("charts/SPS", series["step"][:0])[-RECENT:]
    memory = series.get("system/memory_gb", series["step"][:0])
    prefix = "time/"
    return Summary(
        state=state,
        total_timesteps=last["step"],
        total_updates=last["update"],
        duration_hours=last["time"] / 3600,
        avg_fps=last["step"] / max(last["time"], 1e-9),
        final_fps=float(speeds[speeds == speeds].mean()) if (speeds == speeds).any() else 0.0,
        peak_memory_gb=float(memory[memory == memory].max()) if (memory == memory).any() else 0.0,
        initial_reward=float(rewards[0]) if len(rewards) else None,
        final_reward=last.get("charts/episodic_return"),
        best_reward=float(rewards.max()) if len(rewards) else None,
        num_episodes=last.get("charts/episodes", 0),
        phase_shares={name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)},
        cpu_utilization=last.get("system/cpu_utilization"),
    )
