"""Runs for the analysis tests: real ones, and copies of them with another seed, game or outcome."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import yaml

NAMES = ("ppo_sequential", "ppo_parallel", "a2c_sequential", "a2c_parallel")


def copy_run(source: Path, target: Path, *, config: dict[str, Any] | None = None, **summary: Any) -> Path:
    """A run of its own, with settings (`section.key`) and entries of the summary changed, the task in all files."""
    shutil.copytree(source, target)
    data = yaml.safe_load((target / "config.yaml").read_text())
    changes = config or {}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        data[section][key] = value
    (target / "config.yaml").write_text(yaml.safe_dump(data))
    env = data["env"]["name"]
    mine = {"run_id": uuid.uuid4().hex, "env": env, "seed": data["env"]["seed"]} | summary
    for name in ("training_summary.json", "benchmark_metrics.json"):
        edit_json(target / name, **mine)
    for file in target.glob("evaluation_*.json"):
        origin = json.loads(file.read_text()).get("origin") or {}
        edit_json(file, env=env, origin=origin | {"env": data["env"], "run_id": mine["run_id"]})
    return target


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def evaluate_as(run: Path, env: str, **rewards: float) -> None:
    """Evaluations of the run: `evaluate_as(run, env, train=6.0, test=5.0)`."""
    base = json.loads(next(run.glob("evaluation_*.json")).read_text())
    for file in run.glob("evaluation_*.json"):
        file.unlink()
    for levels, reward in rewards.items():
        content = base | {"levels": levels, "mean_reward": reward, "env": env, "ci95": [reward - 0.5, reward + 0.5]}
        (run / f"evaluation_{levels}.json").write_text(json.dumps(content))
