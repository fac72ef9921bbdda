"""It learns: toy problems to their end, from the command line."""

import json
import time

import pytest
from conftest import rlcb

SETTINGS = {
    "CartPole-v1": (
        "--num-envs", 16, "--batch-size", 256, "--total-timesteps", 150_000, "--learning-rate", 0.001,
        "--set", "training.gamma=0.99", "--set", "training.n_steps=64", "--set", "training.ent_coef=0.0",
        "--set", "training.anneal_lr=true",
    ),
    "Catch-v0": (
        "--num-envs", 16, "--batch-size", 256, "--total-timesteps", 80_000, "--learning-rate", 0.001,
        "--set", "training.gamma=0.99", "--set", "training.n_steps=64", "--set", "training.anneal_lr=true",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("env", "target"), [("CartPole-v1", 475), ("Catch-v0", 0.95)])
def test_ppo_solves(env, target, tmp_path):
    start = time.monotonic()
    done = rlcb("train", "--env", env, *SETTINGS[env], "--num-threads", 1, "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    report = tmp_path / "result.json"
    done = rlcb(
        "evaluate", "--checkpoint", tmp_path / "run" / "checkpoints" / "ppo_sequential_final.pt",
        "--num-episodes", 100, "--json", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["mean_reward"] >= target
    assert time.monotonic() - start < 60
