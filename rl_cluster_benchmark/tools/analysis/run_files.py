"""The files of a run, read with care: they may be cut short, of an older format, or a stranger's."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.atomic_files import open_plain
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.text import plain
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis.series import MAX_NUMBER, Series, columns, read_series

MAX_TEXT = 2000
Number = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_NUMBER, le=MAX_NUMBER)]
Amount = Annotated[Number, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=int(MAX_NUMBER))]
Text = Annotated[str, AfterValidator(lambda text: text[:MAX_TEXT])]

MAX_FILE = 1_000_000
RECENT = 10  # lines of the log that make up the final speed


class UnusableRunError(UserError):
    """A directory that holds no run that can be read; the message is the reason."""


@dataclass(frozen=True)
class LeftOut:
    """A directory or a file that is left out of a comparison, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return plain(f"{self.path}: {self.reason}")


class Checkpoint(BaseModel):
    """Which checkpoint a result is of."""

    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    steps: Amount


class TrainedPart(BaseModel):
    """What a part of a run was trained with, from its start or a resume to its end."""

    cpu_model: Text | None = None
    usable_cores: Count | None = None
    num_workers: Count | None = None
    num_learners: Count | None = None
    precision: Text | None = None
    engine: Text | None = None
    git_commit: Text | None = None


class Summary(BaseModel):
    """training_summary.json, as far as it is used here."""

    run_id: Text | None = None
    algorithm: Text | None = None
    mode: Text | None = None
    env: Text | None = None
    seed: int | None = None
    state: Literal["finished", "interrupted", "failed"]
    reason: Text | None = None
    total_timesteps: Amount
    total_updates: Amount
    duration_hours: Amount
    avg_fps: Amount
    final_fps: Amount
    peak_memory_gb: Amount
    initial_reward: Number | None = None
    initial_reward_std: Amount | None = None
    final_reward: Number | None = None
    final_reward_std: Amount | None = None
    best_reward: Number | None = None
    num_episodes: Amount = 0
    num_workers: Annotated[Count, Field(ge=1)] | None = None  # unknown while there is no summary
    num_learners: Count | None = None  # of IMPALA, on all machines
    phase_shares: dict[str, Number] = {}
    asynchrony: dict[str, Number] = {}
    cpu_utilization: Number | None = None
    num_threads: Count | None = None
    precision: Text | None = None
    cpu_model: Text | None = None
    usable_cores: Count | None = None
    parts: list[TrainedPart] = []  # those that differ; older runs do not say
    checkpoint: Checkpoint | None = None  # which the run ended with
    finished_at: Text | None = None
    git_commit: Text | None = None
    versions: dict[str, Text] = {}

    @property
    def changes(self) -> dict[str, str]:
        """Return what was not the same in all parts of the run: {"num_workers": "1 then 2"}."""
        values = {
            name: list(dict.fromkeys(getattr(part, name) for part in self.parts)) for name in TrainedPart.model_fields
        }
        return {name: " then ".join(map(str, each)) for name, each in values.items() if len(each) > 1}


def is_inside(root: Path, file: Path) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(root))


def _require_inside(root: Path, file: Path) -> None:
    if not is_inside(root, file) or not file.is_file():
        raise UnusableRunError(f"{file.name} leads outside the run's directory, or is no plain file")


def read_inside(
    root: Path, file: Path, limit: int = MAX_FILE, too_large: str = "not written by this program"
) -> bytes | None:
    """Return the content of a run's file, None if there is none; raise if it is too large or leads outside."""
    try:
        if not os.path.lexists(file):
            return None
        _require_inside(root, file)
        with open_plain(file) as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise UnusableRunError(f"{file.name} cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise UnusableRunError(f"{file.name} is larger than {limit:,} bytes: {too_large}")
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
        return configs.build(data, configs.AS_IT_WAS, source="config.yaml")
    except ValueError:
        raise UnusableRunError("config.yaml is damaged") from None
    except UserError as error:
        sentence = str(error).splitlines()[0].removeprefix("config.yaml: ").rstrip(".")
        raise UnusableRunError(f"config.yaml is damaged or of an older format ({sentence[:200]})") from None


def load_series(path: Path, config: Config) -> Series:
    label = RunDirectory.of(config.model_copy(update={"output_dir": "."})).logs
    for file in (path / label / "metrics.jsonl", path / "metrics.jsonl"):
        if os.path.lexists(file):
            _require_inside(path, file)
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
            summary = Summary.model_validate(json.loads(content))
        except (ValueError, RecursionError) as error:
            what = f" ({first_problem(error)})" if isinstance(error, ValidationError) else ""
            raise UnusableRunError(f"{name} is damaged or of an older format{what}") from None
        mine = (config.traits.label, config.mode, config.env.name, config.env.seed)
        theirs = (summary.algorithm, summary.mode, summary.env, summary.seed)
        if any(b not in (None, a) for a, b in zip(mine, theirs, strict=True)):
            raise UnusableRunError(f"{name} and config.yaml are of different runs")
        return summary
    return None


def first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"[:120]


def summary_of(series: Series, state: Literal["interrupted"]) -> Summary:
    """Return what the log alone tells about a run that has not written its summary, or not its last one."""
    if not len(series["step"]):
        return Summary(
            state=state, total_timesteps=0, total_updates=0, duration_hours=0, avg_fps=0, final_fps=0, peak_memory_gb=0
        )

    def known(name: str, last: int = 0) -> NDArray[np.float64]:
        values = series.get(name, series["step"][:0])[-last:]
        return values[np.isfinite(values)]

    last = {name: float(values[-1]) for name, values in series.items() if np.isfinite(values[-1])}
    rewards = series.get("charts/episodic_return", series["step"][:0])
    if len(rewards):
        rewards = rewards[(series.get("charts/episodes", rewards) >= WINDOW) & np.isfinite(rewards)]
    speeds, memory = known("charts/SPS", RECENT), known("system/memory_gb")
    prefix = "time/"
    return Summary(
        state=state,
        total_timesteps=last["step"],
        total_updates=last["update"],
        duration_hours=last["time"] / 3600,
        avg_fps=last["step"] / max(last["time"], 1e-9),
        final_fps=float(speeds.mean()) if len(speeds) else 0.0,
        peak_memory_gb=float(memory.max()) if len(memory) else 0.0,
        initial_reward=float(rewards[0]) if len(rewards) else None,
        final_reward=last.get("charts/episodic_return"),
        best_reward=float(rewards.max()) if len(rewards) else None,
        num_episodes=last.get("charts/episodes", 0),
        phase_shares={name.removeprefix(prefix): value for name, value in last.items() if name.startswith(prefix)},
        cpu_utilization=last.get("system/cpu_utilization"),
    )
