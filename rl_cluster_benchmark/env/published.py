"""Results that OpenAI published with the Procgen benchmark: score ranges, and the learning curves of its PPO.

Source: the train-procgen repository (MIT licence): the ranges of its constants, and the results of procgen 0.9.2 (three
seeds, 64 environments, IMPALA-CNN), reduced to mean and standard deviation over seeds at a few steps.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rl_cluster_benchmark.config.schema import EnvConfig

# (minimum, maximum): a score is normalised to (reward - minimum) / (maximum - minimum).
SCORE_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "easy": {
        "bigfish": (1, 40), "bossfight": (0.5, 13), "caveflyer": (3.5, 12), "chaser": (0.5, 13),
        "climber": (2, 12.6), "coinrun": (5, 10), "dodgeball": (1.5, 19), "fruitbot": (-1.5, 32.4),
        "heist": (3.5, 10), "jumper": (1, 10), "leaper": (1.5, 10), "maze": (5, 10),
        "miner": (1.5, 13), "ninja": (3.5, 10), "plunder": (4.5, 30), "starpilot": (2.5, 64),
    },
    "hard": {
        "bigfish": (0, 40), "bossfight": (0.5, 13), "caveflyer": (2, 13.4), "chaser": (0.5, 14.2),
        "climber": (1, 12.6), "coinrun": (5, 10), "dodgeball": (1.5, 19), "fruitbot": (-0.5, 27.2),
        "heist": (2, 10), "jumper": (1, 10), "leaper": (1.5, 10), "maze": (4, 10),
        "miner": (1.5, 20), "ninja": (2, 10), "plunder": (3, 30), "starpilot": (1.5, 35),
    },
}  # fmt: skip


class CurvePoint(NamedTuple):
    step: int
    mean: float
    std: float  # over three seeds


def normalized_score(env: EnvConfig, reward: float) -> float | None:
    """Return the reward scaled so that 0 and 1 are the published range; None where no range is published.

    There is none for toy environments and for difficulties other than easy and hard.
    """
    bounds = SCORE_RANGES.get(env.distribution_mode, {}).get(env.game or "")
    return (reward - bounds[0]) / (bounds[1] - bounds[0]) if bounds else None


def changed_settings(env: EnvConfig) -> dict[str, object]:
    """Return the settings, except difficulty and number of levels, in which the task differs from Procgen's default."""
    usual = EnvConfig().model_dump()
    own = ("name", "distribution_mode", "num_levels", "num_envs", "seed")
    return {key: value for key, value in env.model_dump().items() if key not in own and value != usual[key]}


def curve(env: EnvConfig, split: str = "train") -> list[CurvePoint]:
    """Return the published PPO curve to compare a run on this environment with; an empty list where there is none."""
    if env.distribution_mode != "easy" or env.game is None or changed_settings(env):
        return []
    setting = {(200, 0): "easy-200", (0, 0): "easy-all"}.get((env.num_levels, env.start_level))
    if setting is None:
        return []
    split = "train=test" if setting == "easy-all" else split
    return _curves().get((setting, split, env.game), [])


@cache
def _curves() -> dict[tuple[str, str, str], list[CurvePoint]]:
    curves: dict[tuple[str, str, str], list[CurvePoint]] = {}
    with open(Path(__file__).with_name("procgen_ppo_published.csv"), newline="") as file:
        for row in csv.DictReader(file):
            point = CurvePoint(round(float(row["step_M"]) * 1e6), float(row["mean_3seeds"]), float(row["sd_3seeds"]))
            curves.setdefault((row["setting"], row["split"], row["game"]), []).append(point)
    return curves
