"""IMPALA and A3C learn toy problems to their end, from the command line, even while their actors are killed."""

import contextlib
import json
import time

import psutil
import pytest
from conftest import rlcb
from processes import running, wait_for_line
from test_parallel import workers_of

COMMON = ("--num-envs", 16, "--num-threads", 1, "--learning-rate", 0.002, "--set", "training.gamma=0.99",
          "--set", "training.anneal_lr=true")  # fmt: skip
SETTINGS = {
    "impala": ("--set", "training.n_steps=20", "--batch-size", 160),
    "a3c": ("--set", "training.n_steps=16"),
}
NO_BONUS = {"impala": ("--set", "impala.entropy_coef=0"), "a3c": ("--set", "training.ent_coef=0")}
PROBLEMS = {"CartPole-v1": (300_000, {"impala": 475, "a3c": 400}), "Catch-v0": (120_000, {"impala": 0.95, "a3c": 0.95})}
WORKERS = {"impala": ("--num-workers", 1), "a3c": ("--num-workers", 2)}


def call(algorithm, mode, env, output):
    steps, _ = PROBLEMS[env]
    workers = WORKERS[algorithm] if mode == "parallel" else ()
    bonus = NO_BONUS[algorithm] if env == "CartPole-v1" else ()
    return ("--algorithm", algorithm, "--mode", mode, "--env", env, *COMMON, *SETTINGS[algorithm], *workers, *bonus,
            "--total-timesteps", steps, "--output-dir", output)  # fmt: skip


def score(algorithm, mode, output):
    report = output / "result.json"
    file = output / "checkpoints" / f"{algorithm}_{mode}_final.pt"
    done = rlcb("evaluate", "--algorithm", algorithm, "--checkpoint", file, "--num-episodes", 100, "--json", report)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())["mean_reward"]


@pytest.mark.parametrize(
    "env", [pytest.param(env, marks=pytest.mark.long if env == "CartPole-v1" else ()) for env in PROBLEMS]
)
@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_it_solves(algorithm, mode, env, tmp_path):
    start = time.monotonic()
    done = rlcb("train", *call(algorithm, mode, env, tmp_path))
    assert done.returncode == 0, done.stderr
    assert score(algorithm, mode, tmp_path) >= PROBLEMS[env][1][algorithm]
    assert time.monotonic() - start < 120


@pytest.mark.long
def test_impala_solves_catch_while_its_actors_are_killed(tmp_path):
    """One of two actors every few seconds: whenever the last one killed has been replaced."""
    args = call("impala", "parallel", "Catch-v0", tmp_path)
    with running(*args, "--num-workers", 2, "--total-timesteps", 300_000) as process:
        text = wait_for_line("Step:", process)
        while process.poll() is None:
            time.sleep(2)
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # the run has just come to its end
                _learner, oldest_actor, _ = sorted(workers_of(process), key=lambda worker: worker.create_time())
                oldest_actor.kill()
            for line in process.stdout:
                text += line
                if "started again" in line:
                    break
        assert process.returncode == 0, text
    summary = json.loads((tmp_path / "training_summary.json").read_text())
    assert summary["asynchrony"]["actor_restarts"] >= 2
    assert score("impala", "parallel", tmp_path) >= 0.95
