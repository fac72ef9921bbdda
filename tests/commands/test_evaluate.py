"""Evaluation: exactly the episodes asked for, none favoured, and files that say what was found."""

import json
import os
import shutil

import numpy as np
import pytest
from helpers.commands import rlcb
from helpers.made_once import made_once
from helpers.scripted import ScriptedEnv

from rl_cluster_benchmark.config.schema import EnvConfig
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.env.published import curve, normalized_score
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.tools.evaluation.evaluate import (
    _newest_checkpoint,
    confidence_interval,
    play,
    random_policy,
)

LONG = ([1.0] * 40, "terminated")
SHORT = ([0.0] * 2, "truncated")


@pytest.mark.parametrize("num_episodes", [1, 4, 6, 11])
def test_exactly_as_many_episodes_as_asked(num_episodes):
    env = ScriptedEnv([[SHORT], [LONG], [SHORT], [LONG]])
    rewards, lengths = play(random_policy(env), env, num_episodes, seed=0, deterministic=False)
    assert len(rewards) == len(lengths) == num_episodes


def test_short_episodes_are_not_favoured():
    """Half of the environments play 20 times shorter episodes; they still give half of the sample."""
    env = ScriptedEnv([[SHORT], [LONG]] * 4)
    rewards, lengths = play(random_policy(env), env, 40, seed=0, deterministic=False)
    assert sorted(rewards) == [0.0] * 20 + [40.0] * 20
    assert sorted(lengths) == [2] * 20 + [40] * 20


def test_deterministic_takes_the_likeliest_action():
    taken = []

    class Spy(ScriptedEnv):
        def step(self, actions):
            taken.extend(actions[~np.array(self.ended)])
            return super().step(actions)

    env = Spy([[LONG]])
    play(lambda observations: np.array([[0.0, 0.1, 0.05]] * len(observations)), env, 1, seed=0, deterministic=True)
    assert set(taken) == {1}
    taken.clear()
    play(random_policy(env), Spy([[LONG]]), 1, seed=0, deterministic=False)
    assert set(taken) == {0, 1, 2}


def test_confidence_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = confidence_interval(generator.binomial(1, 0.6, 100) * 10.0, resamples=1000)
        hits += low <= 6.0 <= high
    assert 180 <= hits <= 199


def test_normalized_score():
    assert normalized_score(EnvConfig(name="coinrun"), 7.5) == pytest.approx(0.5)
    assert normalized_score(EnvConfig(name="starpilot", distribution_mode="hard"), 1.5) == 0.0
    assert normalized_score(EnvConfig(name="CartPole-v1"), 500) is None


def test_published_curve():
    points = {point.step: point for point in curve(EnvConfig(name="coinrun"))}
    assert points[500_000].mean == pytest.approx(6.755)
    assert curve(EnvConfig(name="coinrun", num_levels=100)) == []
    assert curve(EnvConfig(name="coinrun", num_levels=0)) != curve(EnvConfig(name="coinrun"))


def test_without_a_checkpoint_the_newest_of_the_algorithm_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("impala_parallel_final.pt", "ppo_sequential_final.pt", "impala_sequential_step_9.pt")):
        file = tmp_path / "runs" / str(age) / "checkpoints" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
        os.utime(file, (100 - age, 100 - age))
    assert _newest_checkpoint(None).name == _newest_checkpoint("impala").name == "impala_parallel_final.pt"
    assert _newest_checkpoint("ppo").name == "ppo_sequential_final.pt"
    with pytest.raises(UserError, match="No A3C checkpoint"):
        _newest_checkpoint("a3c")


def test_of_a_run_its_last_checkpoint_is_taken_whatever_the_dates(trained, tmp_path, monkeypatch):
    """Of a copy that does not keep dates (cp -r, scp -r) any file may be the newest; a clock may have been changed."""
    folder = tmp_path / "runs" / "copy" / "checkpoints"
    shutil.copytree(trained / "checkpoints", folder)
    monkeypatch.chdir(tmp_path)
    final = checkpoint.load(folder / "ppo_sequential_final.pt")
    checkpoint.save(folder / "ppo_sequential_step_96.pt", final | {"progress": final["progress"] | {"steps": 96}})
    os.utime(folder / "ppo_sequential_final.pt", (1, 1))
    assert _newest_checkpoint(None).name == "ppo_sequential_final.pt"
    (folder / "ppo_sequential_final.pt").unlink()
    steps = max(int(file.stem.rpartition("_")[2]) for file in folder.glob("*_step_*.pt"))
    os.utime(folder / f"ppo_sequential_step_{steps}.pt", (1, 1))
    assert _newest_checkpoint("ppo").name == f"ppo_sequential_step_{steps}.pt"


def without_date(report):
    result = json.loads(report.read_text())
    assert result["origin"].pop("evaluated_at").startswith("20")
    return result


def test_the_block_and_the_file(trained, tmp_path):
    report = tmp_path / "result.json"
    path = trained / "checkpoints" / "ppo_sequential_final.pt"
    done = rlcb("evaluate", "--checkpoint", path, "--num-episodes", 30, "--seed", 5, "--json", report)
    assert done.returncode == 0, done.stderr
    for text in (
        "Evaluating PPO Agent", "Environment: Catch-v0", "Observation shape: (10, 5)", "Number of actions: 3",
        "Device: cpu", f"Checkpoint: {path}", "Algorithm: PPO", "Loaded checkpoint from:", "PPO Evaluation Results",
        "Episodes: 30", "Mean Reward:", "Min/Max Reward: -1.00 / 1.00", "Mean Episode Length: 9.00 ± 0.00",
        "95% Interval of the Mean:",
    ):  # fmt: skip
        assert text in done.stdout, text
    result = without_date(report)
    assert {
        "mean_reward", "std_reward", "min_reward", "max_reward", "mean_length", "std_length", "num_episodes",
        "ci95", "normalized_score", "levels", "seed",
    } <= set(result)  # fmt: skip
    assert (result["num_episodes"], result["seed"]) == (30, 5)
    assert result["ci95"][0] <= result["mean_reward"] <= result["ci95"][1]
    again = rlcb("evaluate", "--checkpoint", path, "--num-episodes", 30, "--seed", 5, "--json", report)
    assert again.returncode == 0
    assert without_date(report) == result, "one seed, one result"
    chance = rlcb("evaluate", "--checkpoint", path, "--num-episodes", 100, "--random", "--json", report)
    assert "Random Policy Evaluation Results" in chance.stdout
    assert json.loads(report.read_text())["mean_reward"] == pytest.approx(-0.6, abs=0.3), "one ball in five is caught"


@pytest.fixture(scope="module")
def coinrun(tmp_path_factory):
    """A checkpoint of a small network that has seen a little of CoinRun."""

    def make(folder):
        done = rlcb(
            "train", "--env", "coinrun", "--num-envs", 8, "--batch-size", 128, "--set", "training.n_steps=32",
            "--set", "model.channels=[4, 8]", "--total-timesteps", 500, "--num-threads", 1,
            "--output-dir", folder / "run",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "coinrun", make) / "run" / "checkpoints" / "ppo_sequential_final.pt"


@pytest.mark.parametrize("levels", ["train", "test", "all"])
def test_levels(coinrun, levels, tmp_path):
    report = tmp_path / "result.json"
    done = rlcb(
        "evaluate", "--checkpoint", coinrun, "--levels", levels, "--num-episodes", 2, "--num-threads", 1,
        "--json", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert result["levels"] == levels
    assert result["normalized_score"] == pytest.approx((result["mean_reward"] - 5) / 5)


def test_another_game_can_be_played(coinrun):
    done = rlcb(
        "evaluate", "--checkpoint", coinrun, "--env", "procgen-starpilot-v0", "--num-episodes", 1, "--num-threads", 1
    )
    assert done.returncode == 0, done.stderr
    assert "Environment: procgen-starpilot-v0" in done.stdout
    assert "never trained on" not in done.stdout  # that is said of levels of the game that it was trained on
    assert "Levels: levels from 200 on (the agent was trained on levels 0 to 199 of coinrun, easy)" in done.stdout


def test_where_no_level_is_held_back_none_is_called_unseen(coinrun, tmp_path):
    """Bug 17: an agent that may have met every level is tested on all of them, and the result says so."""
    report = tmp_path / "result.json"
    done = rlcb(
        "evaluate", "--checkpoint", coinrun, "--levels", "test", "--set", "env.num_levels=0", "--num-episodes", 2,
        "--num-threads", 1, "--json", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--levels test: with env.num_levels 0 no level is held back from training" in done.stdout
    assert "Levels: all levels" in done.stdout
    assert json.loads(report.read_text())["levels"] == "all"


def test_agents_are_compared_by_the_levels_that_they_were_evaluated_on(coinrun, tmp_path, call):
    """Bug 17: the commands call all levels what they are, and rank no agent on them against one on unseen levels."""
    one = shutil.copytree(coinrun.parent.parent, tmp_path / "one")
    other = tmp_path / "other"
    assert call("train", "--config", one / "config.yaml", "--seed", 7, "--output-dir", other)[0] == 0

    def evaluate(run, levels):
        final = run / "checkpoints" / coinrun.name
        args = ("--levels", levels, "--num-episodes", 2, "--num-threads", 1)
        assert call("evaluate", "--checkpoint", final, *args, "--json", run / f"evaluation_{levels}.json")[0] == 0

    for run in (one, other):
        evaluate(run, "all")
    status, shown, err = call("compare", one, other)
    assert status == 0, err
    assert call("report", one, other, "--output-dir", tmp_path / "report")[0] == 0
    report = (tmp_path / "report" / "report.md").read_text()
    for text in (shown, report):
        assert "unseen" not in text
        assert "evaluation on all levels" in text

    (other / "evaluation_all.json").unlink()
    evaluate(other, "test")
    status, shown, err = call("compare", one, other)
    assert status == 0, err
    assert "Some agents were evaluated on unseen levels, others on all: those do not compare." in shown
    assert "Normalised scores" not in shown


@pytest.mark.parametrize(("name", "magic"), [("agent.gif", b"GIF89a"), ("agent.mp4", b"ftyp")])
def test_video(coinrun, name, magic, tmp_path):
    file = tmp_path / name
    args = ("--checkpoint", coinrun, "--env", "starpilot", "--num-episodes", 1, "--num-threads", 1, "--video", file)
    done = rlcb("evaluate", *args)
    assert done.returncode == 0, done.stderr
    assert magic in file.read_bytes()[:12]
    assert file.stat().st_size > 10_000


def test_plot(trained, tmp_path):
    picture = tmp_path / "curves.png"
    log = trained / "logs" / "PPO_Sequential" / "metrics.jsonl"
    done = rlcb("plot", "--log-file", log, "--output", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
