"""EnvPool's Procgen as we rely on it."""

import subprocess
import sys

import numpy as np
import pytest
from helpers.commands import ROOT, environment

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import MAX_LEVEL, PROCGEN_GAMES, EnvConfig
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.env.environments import PROCGEN, level_range, make_env
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.tools.analysis.groups import LearningTask
from rl_cluster_benchmark.tools.evaluation.evaluate import level_text


def play(env, steps, action=4):
    """Observations, terminated and truncated of a few steps with one action."""
    frames = [env.reset().copy()]
    ends = []
    for _ in range(steps):
        step = env.step(np.full(env.num_envs, action, dtype=np.int32))
        frames.append(step.observations.copy())
        ends.append((step.terminated.copy(), step.truncated.copy()))
    return np.array(frames), ends


@pytest.mark.parametrize("game", PROCGEN_GAMES)
def test_every_game(game):
    env = make_env(EnvConfig(name=game), range(3), num_threads=2)
    frames, _ = play(env, 5)
    assert frames.shape == (6, 3, 64, 64, 3)
    assert frames.dtype == np.uint8
    assert (env.num_actions, env.observation_shape, env.observation_dtype) == PROCGEN
    assert frames.std() > 1


@pytest.mark.parametrize("name", ["coinrun", "procgen-coinrun-v0", "procgen:procgen-coinrun-v0"])
def test_three_spellings(name):
    assert EnvConfig(name=name).name == "procgen-coinrun-v0"


@pytest.mark.parametrize(("name", "shape", "actions"), [("CartPole-v1", (4,), 2), ("Catch-v0", (10, 5), 3)])
def test_toy_environments(name, shape, actions):
    env = make_env(EnvConfig(name=name), range(2), num_threads=1)
    assert (env.observation_shape, env.num_actions) == (shape, actions)
    assert env.reset().shape == (2, *shape)


def test_an_environment_depends_on_its_number_and_nothing_else():
    config = EnvConfig(name="coinrun")
    four, _ = play(make_env(config, range(4), num_threads=1), 60)
    threaded, _ = play(make_env(config, range(4), num_threads=2), 60)
    last_two, _ = play(make_env(config, range(2, 4), num_threads=1), 60)
    np.testing.assert_array_equal(four, threaded)
    np.testing.assert_array_equal(four[:, 2:], last_two)
    assert (four[0, 0] != four[0, 1]).any()
    another, _ = play(make_env(config.model_copy(update={"seed": 43}), range(4), num_threads=1), 1)
    resumed, _ = play(make_env(config, range(4), num_threads=1, incarnation=5), 1)
    assert (four[0] != another[0]).any()
    assert (four[0] != resumed[0]).any()


def test_after_the_end_comes_the_true_last_frame_and_then_a_new_level():
    """EnvPool's contract that rollout.py stands on: the frame that comes with the end belongs to the old level."""
    env = make_env(EnvConfig(name="maze", num_levels=0), range(4), num_threads=1)
    env.reset()
    actions = np.zeros(4, dtype=np.int32)
    levels = []
    for step in range(1, 503):
        _, rewards, terminated, truncated, info = env._pool.step(actions)
        levels.append(info["level_seed"].copy())
        assert (truncated == (step == 500)).all(), "a maze's own limit"
        assert not terminated.any()
        assert not rewards.any()
    assert (np.array(levels[:500]) == levels[0]).all()
    assert (levels[500] != levels[499]).all()
    assert (levels[501] == levels[500]).all()


def test_levels():
    config = EnvConfig(num_levels=200, start_level=1000)
    assert level_range(config, "train") == (1000, 200)
    assert level_range(config, "all") == (0, 0)
    first, count = level_range(config, "test")
    assert first == 1200
    assert first + count == MAX_LEVEL
    assert level_range(EnvConfig(num_levels=0), "test") == (0, 0)


def test_training_levels_are_those_asked_for():
    """One level only: every environment starts with the same picture; test levels differ from it."""
    config = EnvConfig(name="coinrun", num_levels=1, start_level=7)
    train = make_env(config, range(3), num_threads=1).reset()
    test = make_env(config, range(3), num_threads=1, levels="test").reset()
    assert (train[0] == train[1]).all()
    assert (train[0] == train[2]).all()
    assert all((train[0] != frame).any() for frame in test)


def test_options_reach_the_game():
    plain = make_env(EnvConfig(num_levels=1, use_backgrounds=False), range(1), num_threads=1).reset()
    usual = make_env(EnvConfig(num_levels=1), range(1), num_threads=1).reset()
    hard = make_env(EnvConfig(num_levels=1, distribution_mode="hard"), range(1), num_threads=1).reset()
    assert (plain != usual).any()
    assert (hard != usual).any()


def test_a_machine_without_threads_gets_a_sentence(tmp_path):
    """EnvPool starts a thread for each environment or core; a limit on memory or threads makes that fail."""
    call = f"ulimit -v 800000; exec {sys.executable} -m rl_cluster_benchmark train --env Catch-v0 --num-envs 8"
    done = subprocess.run(
        ["bash", "-c", f"{call} --total-timesteps 3000 --output-dir {tmp_path / 'run'}"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "could not be started" in done.stderr
    assert "Traceback" not in done.stderr


def test_exploration_is_called_what_it_is():
    """It is a single level, whatever env.num_levels says."""
    config = configs.load(None, {"env.distribution_mode": "exploration", "env.num_levels": 0})
    assert "its one level" in str(LearningTask(config.env))
    assert level_text("all", config.env, config.env) == "the single level of exploration mode"
    env = make_env(config.env, range(4), num_threads=1)
    first = env.reset()
    assert all(np.array_equal(first[0], other) for other in first)


def test_sequential_levels_are_refused(trained, tmp_path):
    """Bug 14: EnvPool's Procgen takes them and ends every episode with its level all the same."""
    with pytest.raises(UserError, match=r"env.use_sequential_levels = true does nothing: in EnvPool's Procgen"):
        configs.load(None, {"env.use_sequential_levels": True})
    # What was trained with it was trained as if without, and is read as that.
    state = checkpoint.load(trained / "checkpoints" / "ppo_sequential_final.pt")
    state["config"]["env"]["use_sequential_levels"] = True
    checkpoint.save(tmp_path / "old.pt", state)
    assert checkpoint.load(tmp_path / "old.pt")["config"]["env"]["use_sequential_levels"] is False


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("center_agent", False), ("use_backgrounds", False), ("use_monochrome_assets", True), ("restrict_themes", True),
        ("use_generated_assets", True), ("paint_vel_info", True), ("distribution_mode", "hard"), ("start_level", 50),
        ("num_levels", 1), ("seed", 2),
    ],
)  # fmt: skip
def test_every_key_of_procgen_changes_what_is_seen(key, value):
    """Bug 14's kind: Jumper knows all of them."""

    def seen(**changes):
        config = EnvConfig.model_validate({"name": "jumper", "num_levels": 3} | changes)
        return play(make_env(config, range(4), num_threads=1), 3)[0]

    assert np.array_equal(seen(), seen())
    assert not np.array_equal(seen(), seen(**{key: value}))
