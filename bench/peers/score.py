"""Time to score: PPO of ours and of Stable-Baselines3, trained for the same time, playing the same test levels.

Both are played by the same code with the same seed: what differs is the network that was trained.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from job import NUM_ACTIONS, NUM_LEVELS
from measure import PeerFailedError, run_to_end
from network import ActorCritic
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.env.environments import make_env
from rl_cluster_benchmark.machine import detection, planning
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.tools.evaluation.evaluate import (
    EVALUATION,
    MAX_ENVS,
    Policy,
    confidence_interval,
    play,
    trained_policy,
)

PLAYERS = {"ours": "this project", "sb3": "Stable-Baselines3"}
SEED = 0


@dataclass(frozen=True)
class Score:
    reward: float
    low: float
    high: float
    episodes: int


def main(
    args: argparse.Namespace, call_of: Callable[[str], list[str]], output: Path, python_path: Sequence[str]
) -> int:
    machine = detection.detect()
    found: dict[str, Any] = {
        "seconds": args.seconds,
        "date": date.today().isoformat(),
        "machine": {"cpu": machine.cpu_model, "cores": machine.usable_cores},
        "players": {},
    }
    for name, title in PLAYERS.items():
        print(f"{title}: training PPO for {args.seconds:g} s ...", flush=True)
        network = output / f"score_{name}.pt"
        options = ["--algorithm", "ppo", "--seconds", str(args.seconds), "--save", str(network.resolve())]
        options += ["--n-steps", str(args.n_steps)] if args.n_steps else []
        try:
            log = output / "logs" / f"score_{name}.txt"
            lines = run_to_end([*call_of(name), *options], log, python_path=python_path)
        except PeerFailedError as error:
            print(f"  failed: {error}", flush=True)
            found["players"][name] = {"failed": str(error)}
            continue
        if not lines or not network.is_file():
            found["players"][name] = {"failed": "no update in that time"}
            print("  no update in that time; train for longer", flush=True)
            continue
        result = evaluate(name, network, args.episodes)
        steps, seconds = lines[-1]["env_steps"], lines[-1]["time"] - lines[0]["time"]
        found["players"][name] = {"env_steps": steps, "trained_seconds": seconds, **vars(result)}
        print(f"  {steps:,} env steps in {seconds:,.0f} s; {_text(result)}", flush=True)
    write_atomically(output / "score.json", (json.dumps(found, indent=2) + "\n").encode())
    print(f"Saved {output}/score.json")
    return 1 if any("failed" in player for player in found["players"].values()) else 0


def evaluate(name: str, network: Path, episodes: int) -> Score:
    """Episodes on levels that nobody was trained on, the same for all."""
    changes: dict[str, object] = {"env.num_levels": NUM_LEVELS, "env.distribution_mode": "easy", "env.seed": SEED}
    state = checkpoint.load(network) if name == "ours" else None
    config = config_files.build(state["config"] if state else {}, changes, source="score")
    plan = planning.compiled(config, planning.plan(config))
    num_envs = min(episodes, MAX_ENVS)
    env = make_env(
        config.env, range(num_envs), num_threads=detection.detect().usable_cores, levels="test", incarnation=EVALUATION
    )
    policy = trained_policy(config, state, env, plan) if state else policy_of(network)
    rewards, _ = play(policy, env, episodes, seed=SEED, deterministic=False)
    return Score(float(rewards.mean()), *confidence_interval(rewards), episodes)


def policy_of(network: Path) -> Policy:
    """A network that a peer's script has saved."""
    model = ActorCritic(NUM_ACTIONS)
    state = torch.load(network, weights_only=True)
    model.trunk.load_state_dict(state["trunk"])
    model.policy.load_state_dict(state["policy"])

    @torch.inference_mode()
    def policy(observations: NDArray) -> NDArray[np.float32]:
        return model(torch.from_numpy(observations))[0].numpy()

    return policy


def _text(score: Score) -> str:
    return f"reward {score.reward:.2f} ({score.low:.2f} to {score.high:.2f}, 95%) over {score.episodes} episodes"
