"""`rlcb checkpoint`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config.traits import LABELS
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.checkpoint import all_finite
from rl_cluster_benchmark.run.metrics import EpisodeStatistics


def inspect(path: Path, *, as_json: bool) -> int:
    found = describe(path)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name.replace('_', ' ').capitalize():{width}}  {_shown(value)}")
    return 0


def verify(paths: list[Path]) -> int:
    """Print a line for each file; return status 1 if one of them is not good."""
    files = [file for path in paths for file in _files(path)]
    bad = 0
    for file in files:
        try:
            state = checkpoint.load(file)
        except UserError as error:
            bad += 1
            print(f"BAD   {error}")
            continue
        if not all_finite(state["model"]) or not all_finite(state["algorithm"]):
            bad += 1
            print(f"BAD   {file}: it holds NaN or infinite weights.")
            continue
        print(f"good  {file}: {state['progress']['steps']:,} steps, {state['progress']['updates']:,} updates")
    print(f"{len(files) - bad} of {len(files)} checkpoints are good.")
    return 1 if bad else 0


def describe(path: Path) -> dict[str, Any]:
    data = checkpoint.read(path)
    state = checkpoint.parse(data, path)
    config, progress = state["config"], state["progress"]
    episodes = EpisodeStatistics()
    episodes.load_state_dict(progress["episodes"])
    rewards = episodes.summary()
    return {
        "file": str(path),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "digest": checkpoint.digest_at_end(data),  # by which results name it
        "run_id": state["progress"].get("run_id"),
        "format": state["format_version"],
        "written_by": state.get("written_by"),
        "algorithm": LABELS[config["algorithm"]],
        "mode": config["mode"],
        "environment": config["env"]["name"],
        "seed": config["env"]["seed"],
        "steps": progress["steps"],
        "updates": progress["updates"],
        "training_seconds": round(progress["elapsed"], 3),
        "episodes": rewards["num_episodes"],
        "final_reward": rewards["final_reward"],
        "best_reward": rewards["best_reward"],
        "optimizer": config["training"]["optimizer"],
        "optimizer_steps": int(state["algorithm"]["optimizer"]["steps"]),
        "parameters": sum(tensor.numel() for tensor in state["model"].values()),
        "observations": state["observation_shape"],
        "actions": state["num_actions"],
        "finite": all_finite(state["model"]) and all_finite(state["algorithm"]),
    }


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*.pt") if file.is_file())
    if not found:
        raise UserError(f"There is no checkpoint (*.pt) in {path}.")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
