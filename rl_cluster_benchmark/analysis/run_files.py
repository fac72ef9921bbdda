"""The files of a run, read with care: they may be cut short, of an older format, or a stranger's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from rl_cluster_benchmark import config_files as configs
from rl_cluster_benchmark.analysis.series import Series, columns, read_series
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.episodes import WINDOW

Number = Annotated[float, Field(allow_inf_nan=False)]

MAX_FILE = 1_000_000
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
    asynchrony: dict[str, Number] = {}
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


def load_config(path: Path, running: bool) -> Config:
    content = read_inside(path, path / "config.yaml")
    if content is None:
        if running:
            raise UnusableRunError("running, it has written nothing yet")
        raise UnusableRunError("has no config.yaml: from an older format, or never started")
    try:
        data = configs.parse_yaml(content)
        if not isinstance(data, dict):
            raise UserError("it holds no settings")
        return configs.build(data, {}, source="config.yaml")
    except ValueError:
        raise UnusableRunError("config.yaml is damaged") from None
    except UserError as error:
        sentence = str(error).splitlines()[0].removeprefix("config.yaml: ").rstrip(".")
        raise UnusableRunError(f"config.yaml is damaged or of an older format ({sentence[:200]})") from None


def load_series(path: Path, config: Config) -> Series:
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


def load_summary(path: Path, config: Config) -> Summary | None:
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


def load_evaluations(path: Path, config: Config) -> dict[str, Evaluation]:
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


def summary_of(series: Series, state: Literal["interrupted"]) -> Summary:
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
