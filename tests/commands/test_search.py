"""`rlcb search`: spaces and their mistakes, scores, pruning, suggestions, kills, several processes, results."""

import contextlib
import csv
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest
import yaml
from helpers.commands import ROOT, environment, rlcb
from helpers.forked import Command
from helpers.made_once import made_once
from helpers.processes import is_alive

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.tools.analysis.runs import is_running, load_run
from rl_cluster_benchmark.tools.search import search_trials, searching
from rl_cluster_benchmark.tools.search.sampling import importances, suggest
from rl_cluster_benchmark.tools.search.search_space import Rung
from rl_cluster_benchmark.tools.search.search_trials import Log, is_stopped
from rl_cluster_benchmark.tools.search.searching import SearchProgress, core_shares, search
from rl_cluster_benchmark.tools.search.space_files import read_space, spaces
from rl_cluster_benchmark.tools.search.study import Study, Trial

# A search of seconds: trials of six updates; the second and third trial are random, the later ones follow from results.
SPACE = {
    "algorithm": "ppo",
    "mode": "sequential",
    "total_timesteps": 3000,
    "set": {"env.num_envs": 16, "hardware.num_threads": 1, "logging.tensorboard": False, "training.n_steps": 32},
    "games": {"Catch-v0": {"low": -1, "high": 1}},
    "score": {"last_steps": 1000},
    "prune": [{"at": 1000, "stop": 0.5, "after": 2}],
    "startup_trials": 2,
    "space": {
        "training.learning_rate": {"low": "1e-4", "high": 1e-2, "log": True},
        "training.batch_size": [128, 256],
        "training.n_epochs": {"low": 1, "high": 5},
        "training.optimizer": ["adam", "rmsprop"],
        "training.adam_eps": {"low": 1e-8, "high": 1e-3, "log": True, "when": {"training.optimizer": "adam"}},
    },
    "candidates": [{"training.learning_rate": 3e-4, "training.optimizer": "rmsprop"}],
}


GAME = {"low": 0, "high": 1}


def changed(path, value):
    """The space with another value at `a/b/c`; without that key, if the value is missing."""
    data = json.loads(json.dumps(SPACE))
    *sections, key = path.split("/")
    part = data
    for name in sections:
        part = part[int(name)] if isinstance(part, list) else part[name]
    if value is MISSING:
        del part[key]
    else:
        part[key] = value
    return data


MISSING = object()


def write(folder, data=SPACE, name="space.yaml"):
    (folder / name).write_text(yaml.safe_dump(data, sort_keys=False))
    return str(folder / name)


# Spaces


def test_shipped_spaces_can_be_trained_and_are_no_presets():
    assert spaces() == ["a2c_procgen", "a3c_procgen", "catch", "impala_procgen", "ppo_procgen"]
    assert "catch" not in configs.presets()
    for name in spaces():
        space = read_space(name)
        searching.check_buildable(space)
        for candidate in space.candidates:
            space.config_of(candidate)
    assert list(space.runs()) == ["coinrun_seed1", "starpilot_seed1"]
    assert (space.total_timesteps, space.config_of({}).env.num_envs, space.prune[0].at) == (500_000, 64, 200_000)
    with pytest.raises(UserError, match=r"Did you mean ppo_procgen\?"):
        read_space("ppo_progen")


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("gaems", {}, "gaems is not a known key; known here: config, algorithm,"),
        ("base", {}, "base is not a known key"),
        ("games", MISSING, "games is missing"),
        ("space", {}, "space = {} is not allowed; it must not be empty"),
        ("space", [1], "space must be a section with keys"),
        ("config", "nothing", "Config file nothing does not exist"),
        ("algorithm", "dqn", "algorithm = 'dqn' is not allowed; it must be 'ppo', 'a2c', 'a3c' or 'impala'"),
        ("mode", "distributed", "mode = 'distributed' is not allowed; it must be 'sequential' or 'parallel'"),
        ("total_timesteps", 0, "total_timesteps = 0 is not allowed; it must be at least 1"),
        ("total_timesteps", MISSING, "total_timesteps is missing"),
        ("set/training.gama", 1, "set: training.gama is not a known key; did you mean training.gamma?"),
        ("set/training.gamma", 2, "set: training.gamma = 2 is not allowed; it must be at most 1"),
        ("set/env.name", "maze", "set: env.name is not set here, but by games"),
        ("set/training.batch_size", 64, "space: training.batch_size is under set too"),
        ("games/pong", {"low": 0, "high": 1}, "pong is not a known environment"),
        ("games/Catch-v0/high", -2, "games.Catch-v0.high = -2 must be greater than low = -1"),
        ("games/Catch-v0/middle", 0, "games.Catch-v0.middle is not a known key; known here: low, high"),
        ("games/Catch-v0", 3, "games.Catch-v0 = 3 is not allowed; it must be a section with keys"),
        ("seeds", [1, 1], "seeds has one twice"),
        ("seeds", [-1], "env.seed = -1 is not allowed; it must be at least 0"),
        ("score/last_steps", 5000, "score.last_steps = 5,000 must be at most total_timesteps = 3,000"),
        ("prune/0/at", 3000, "prune.0.at = 3,000 must be more than 0, less than total_timesteps = 3,000"),
        ("prune/0/stop", 1, "prune.0.stop = 1 is not allowed"),
        ("prune", {"at": 3}, "prune = {'at': 3} is not allowed; it must be a list"),
        ("space/training.lr", [1], "space: training.lr is not a known key; "),
        ("space/training", [1], "space: training is a section; name its keys"),
        ("set/training", {"gamma": 0.9}, "set: training is a section; name its keys"),
        ("set/impala", {"loss": "mean"}, "set: impala is a section; name its keys"),
        ("space/impala.clip_range", [0.1, 0.2], "impala.clip_range has no effect: ppo does not use it (impala does)"),
        ("set/impala.passes", 2, "impala.passes has no effect: ppo does not use it (impala does)"),
        ("games", {"coinrun": GAME, "procgen-coinrun-v0": {**GAME}}, "games has one twice (coinrun, procgen-coinrun"),
        ("space/env.seed", [1], "space: env.seed is not set here, but by seeds"),
        ("space/algorithm", ["ppo"], "space: algorithm is not set here"),
        ("space/training.batch_size", [128, "big"], "space: training.batch_size = 'big' is not allowed"),
        ("space/training.batch_size", [128, 128], "training.batch_size has a choice twice"),
        ("space/training.batch_size", [], "training.batch_size must have at least one choice"),
        ("space/training.batch_size", 128, "space.training.batch_size = 128 is not allowed"),
        ("space/training.n_epochs/low", 1.5, "training.n_epochs = 1.5 is not allowed; it must be a whole number"),
        ("space/training.n_epochs/low", 5, "training.n_epochs: high = 5 must be greater than low = 5"),
        ("space/training.n_epochs/high", MISSING, "training.n_epochs must have both low and high"),
        ("space/training.n_epochs/step", 3, "training.n_epochs: step = 3 must be a whole number whose multiples"),
        ("space/training.n_epochs/choices", [1], "training.n_epochs must have either choices or low and high"),
        ("space/training.learning_rate/low", 0, "training.learning_rate = 0 is not allowed; it must be greater than 0"),
        ("space/training.learning_rate/log", "x", "space.training.learning_rate.log = 'x' is not allowed"),
        ("space/training.ent_coef", {"low": 0, "high": 1, "log": True}, "a log range must have a low greater than 0"),
        ("space/training.optimizer", {"low": 0, "high": 1}, "training.optimizer has no range; give choices (it takes"),
        ("space/training.adam_eps/when", {"training.gamma": 1}, "when names training.gamma, which must be a key with"),
        ("space/training.adam_eps/when", {"training.optimizer": "sgd"}, "training.optimizer = 'sgd' is not allowed"),
        ("space/training.optimizer", ["rmsprop"], "when training.optimizer = adam is never so; it must be among rms"),
        ("candidates/0/training.gamma", 1, "candidate 1: training.gamma is not in the space; it must be one of"),
        ("candidates/0/training.learning_rate", 1, "candidate 1: training.learning_rate = 1.0 is not in the space; it"),
        ("candidates/0/training.adam_eps", 1e-5, "training.adam_eps exists only with training.optimizer = adam"),
    ],
)  # fmt: skip
def test_a_wrong_space_gets_one_sentence(path, value, sentence, tmp_path, call):
    space, output = write(tmp_path, changed(path, value)), tmp_path / "search"
    status, _, error = call("search", "--space", space, "--trials", 1, "--output-dir", output)
    assert status == 2
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "Say how long to search: --trials N, --budget HOURS, or both."),
        (("--trials", 0), "--trials: 0 is not allowed"),
        (("--budget", "nan"), "--budget: nan is not allowed"),
        (("--trials", 1), "There is no search in"),
        (("--trials", 1, "--space", "pong"), "Space pong does not exist. Spaces that are shipped: a2c_procgen"),
        (("--trials", 1, "--space", "catch", "--enqueue", "nothing"), "--enqueue nothing: cannot be read"),
        (("--trials", 1, "--enqueue", "nothing"), "--enqueue needs --space"),
    ],
)
def test_wrong_options_get_one_sentence(args, sentence, tmp_path, call):
    status, _, error = call("search", *args, "--output-dir", tmp_path / "search")
    assert status == 2
    assert sentence in error
    assert "Traceback" not in error
    assert not (tmp_path / "search").exists()


def test_fixed_settings_that_do_not_go_together_are_refused_at_once(tmp_path, call):
    space = write(tmp_path, changed("set/training.n_steps", 5))  # rollouts of 80 steps: no batch_size divides them
    data = yaml.safe_load(Path(space).read_text())
    data["space"]["training.batch_size"] = [3, 7]
    status, _, error = call("search", "--space", write(tmp_path, data), "--trials", 1, "--output-dir", tmp_path / "s")
    assert status == 2
    assert "No trial of this space can be trained; the first one: training.batch_size = " in error
    assert not (tmp_path / "s").exists()


def test_trials_whose_environments_depend_on_their_cores_are_refused(tmp_path, call):
    """--jobs would decide how many there are; a number of workers, or one of environments, makes trials alike."""
    base = {"algorithm": "a2c", "mode": "parallel", "parallel": {"num_envs_per_worker": 8}, "training": {"n_steps": 16}}
    data = {"config": write(tmp_path, base, "base.yaml"), **{key: SPACE[key] for key in ("games", "score")}}
    data |= {"total_timesteps": 3000, "space": {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}}
    output = tmp_path / "search"
    status, _, error = call("search", "--space", write(tmp_path, data), "--trials", 1, "--output-dir", output)
    assert (status, error.count("\n"), output.exists()) == (2, 1, False), error
    assert "num_envs_per_worker = 8 and no number of workers, the environments of a trial would depend on" in error
    for fixed in ({"parallel.num_workers": 2}, {"env.num_envs": 16, "parallel.num_envs_per_worker": None}):
        searching.check_buildable(read_space(write(tmp_path, data | {"set": fixed})))


def test_trials_have_the_environments_that_the_space_says_whatever_share_the_preset_gives_each_worker(tmp_path):
    """`ppo_parallel` has four workers with eight environments each."""
    data = {key: SPACE[key] for key in ("games", "score")} | {"config": "ppo_parallel", "total_timesteps": 3000}
    space = read_space(write(tmp_path, data | {"space": {"env.num_envs": [16, 64]}}))
    trained = {n: planning.resolve(space.config_of({"env.num_envs": n}))[0].env.num_envs for n in (16, 64)}
    assert trained == {16: 16, 64: 64}
    data |= {"set": {"env.num_envs": 64}, "space": {"training.gamma": [0.9, 0.99]}}
    fixed = read_space(write(tmp_path, data)).config_of({"training.gamma": 0.9})
    assert planning.resolve(fixed)[0].env.num_envs == 64


def test_without_optuna_the_command_says_what_to_install(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, _, error = call("search", "--space", "catch", "--trials", 1)
    assert status == 2
    assert 'needs Optuna, which is not installed: pip install "optuna>=5"' in error


# Sampling


def ended(space, count):
    """Trials that have ended, each suggested from those before it; a third is stopped, some fail."""
    made = []
    for number in range(count):
        params = suggest(space, number, made)
        value = -abs(math.log(params["training.learning_rate"] / 1e-3))
        state = ("complete", "pruned", "complete", "failed")[number % 4]
        score, rungs = (value if state == "complete" else None), ({} if state == "failed" else {1000: value})
        made.append(Trial(number=number, state=state, params=params, score=score, rungs=rungs))
    return made


def test_suggestions_stay_in_the_space_and_respect_dependent_keys(tmp_path):
    space = read_space(write(tmp_path))
    made = [trial.params for trial in ended(space, 30)]
    assert made[0]["training.learning_rate"] == 3e-4
    assert made[0]["training.optimizer"] == "rmsprop"
    for params in made:
        assert ("training.adam_eps" in params) == (params["training.optimizer"] == "adam")
        assert all(space.space[key].holds(value) for key, value in params.items())
        assert type(params["training.n_epochs"]) is int
        config = space.config_of(params)
        assert (config.env.name, config.training.learning_rate) == ("Catch-v0", params["training.learning_rate"])
    assert len({params["training.optimizer"] for params in made}) == 2
    early, late = ([abs(math.log(p["training.learning_rate"] / 1e-3)) for p in part] for part in (made[1:8], made[15:]))
    assert sum(late) / len(late) < sum(early) / len(early)  # the sampler has seen where the good ones are


def test_lists_null_and_truth_values_can_be_choices(tmp_path):
    data = changed("space/model.mlp_sizes", [[32], [64, 64]])
    data["space"] |= {"training.target_kl": [None, 0.02], "training.clip_value_loss": [True, False]}
    space = read_space(write(tmp_path, data))
    params = suggest(space, 5, [])
    assert params["model.mlp_sizes"] in ([32], [64, 64])
    assert params["training.target_kl"] in (None, 0.02)
    assert isinstance(params["training.clip_value_loss"], bool)


SUGGESTIONS = """
import sys, json
sys.path[:0] = ["tests", "tests/commands"]
from test_search import ended, read_space
space = read_space(sys.argv[1])
print(json.dumps([trial.params for trial in ended(space, 14)]))
"""


def test_a_suggestion_follows_from_seed_number_and_results_alone(tmp_path):
    """In any process, whatever the order of sets there, and whether the trials are told in order or not."""
    file = write(tmp_path)
    space = read_space(file)
    made = ended(space, 14)
    again = suggest(space, 13, random.Random(0).sample(made[:13], 13))
    assert again == made[13].params
    assert suggest(space, 12, made[:13]) != again  # another number
    other = read_space(write(tmp_path, changed("seed", 1), "other.yaml"))
    assert suggest(other, 13, made[:13]) != again
    call = [sys.executable, "-c", SUGGESTIONS, file]
    environ = environment() | {"PYTHONHASHSEED": "77"}
    done = subprocess.run(call, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [trial.params for trial in made]


# Score and pruning


def test_the_score_of_a_stretch_is_the_mean_of_its_episodes(tmp_path):
    """Against the definition: all episodes between the lines that bound the stretch."""
    rng = random.Random(3)
    lines, episodes, step = [], [], 0
    for update in range(1, 60):
        step += rng.randint(50, 150)
        episodes += [(step, rng.uniform(-5, 10)) for _ in range(rng.choice([0, 0, 1, 3, 200]))]
        lines.append({"step": step, "time": update, "update": update, "charts/episodes": len(episodes),
                      "charts/return_sum": sum(value for _, value in episodes)})  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:20]) + '{"step": 99')
    log = Log(path)
    log.read()
    assert len(log.points) == 20
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log.read()  # the line that was cut short is read when it is whole
    assert len(log.points) == len(lines)
    steps = [0, *(line["step"] for line in lines)]
    for last, at in [(1000, None), (1000, 2500), (500, 1003), (10**9, None), (10**9, 3000), (1, 4000)]:
        end = steps[-1] if at is None else min(s for s in steps if s >= at)
        start = max((s for s in steps if s <= end - last), default=0)
        inside = [value for s, value in episodes if start < s <= end]
        expected = pytest.approx(sum(inside) / len(inside)) if inside else None
        assert log.mean_return(last, at) == expected, (last, at)
    assert log.mean_return(1000, steps[-1] + 1) is None  # it has not come that far


def test_scores_are_normalised_and_averaged_over_games_and_seeds(tmp_path):
    data = changed("games", {"coinrun": {"low": 2.6, "high": 7.9}, "starpilot": {"low": 1.5, "high": 7.4}})
    space = read_space(write(tmp_path, data | {"seeds": [1, 2]}))
    returns = {"coinrun_seed1": 7.9, "starpilot_seed1": 1.5, "coinrun_seed2": 2.6, "starpilot_seed2": 13.3}
    assert set(space.runs()) == set(returns)
    assert space.score_of(returns) == pytest.approx((1 + 0 + 0 + 2) / 4)


@pytest.mark.parametrize("stop", [0.5, 0.25, 0.75])
def test_the_worse_share_is_stopped(stop):
    rung = Rung(at=10, stop=stop, after=4)
    assert not is_stopped(rung, -1.0, [1.0, 2.0, 3.0])  # the first four go on
    rng = random.Random(1)
    for _ in range(200):
        values = [float(rng.randint(0, 8)) for _ in range(rng.randint(4, 12))]
        value = float(rng.randint(0, 8))
        best = sorted([*values, value], reverse=True)
        kept = best[: math.ceil((1 - stop) * len(best))]
        assert is_stopped(rung, value, values) == (value < kept[-1])
    assert not is_stopped(rung, 1.0, [1.0] * 9)  # equal values go on


# The course of a search, with training that is made up


class FakeChild:
    """Writes the log of a run whose returns grow to `learning_rate` x 1000 (half of that on CartPole), at once."""

    failures: dict[int, str] = {}  # trial -> what its log says
    cores: list[object] = []

    def __init__(self, call, *, output, cores=None):
        log, given = output, dict(zip(call[4::2], call[5::2], strict=True))
        output = Path(given["--output-dir"])
        assert not output.exists(), "the earlier attempt is still there"
        trial, self.status = int(output.parent.name), 0
        FakeChild.cores.append(cores)
        if trial in self.failures:
            log.write_text(f"error: {self.failures[trial]}\n")
            self.status = 1
            return
        config = configs.load(given["--config"], {"env.name": given["--env"]})
        level = config.training.learning_rate * 1000 * (0.5 if config.env.name == "CartPole-v1" else 1)
        logs = output / "logs" / "PPO_Sequential"
        logs.mkdir(parents=True)
        total, rows = 0.0, []
        for update in range(1, 7):
            total += 10 * level * update / 6
            row = {"step": 512 * update, "charts/episodes": 10 * update, "charts/return_sum": total}
            rows.append(json.dumps(row) + "\n")
        (logs / "metrics.jsonl").write_text("".join(rows))

    def has_ended(self):
        return True

    def ask_to_end(self):
        pass

    def kill(self):
        pass


@pytest.fixture
def made_up(monkeypatch):
    """Training takes no time."""
    monkeypatch.setattr(search_trials, "ChildProcess", FakeChild)
    monkeypatch.setattr(searching, "SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(FakeChild, "failures", {})
    monkeypatch.setattr(FakeChild, "cores", [])


def candidates(*rates, **top):
    """A space whose trials have these learning rates."""
    data = SPACE | {"space": {"training.learning_rate": {"low": 1e-4, "high": 1e-2}}, **top}
    return data | {"candidates": [{"training.learning_rate": rate} for rate in rates]}


def go(folder, data, number, *, seconds=None, jobs=1):
    space = read_space(write(folder, data)) if data is not None else None
    return search(space, searching.SearchSettings(folder / "search", number, seconds, jobs), Signals())


def states(folder):
    return {trial.number: trial.state for trial in Study.open(folder / "search", None).trials()}


def rows(folder):
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_trials_are_judged_at_the_rung_on_all_their_games(made_up, tmp_path):
    """The mean of the normalised games counts; the second game alone would decide otherwise."""
    games = {"Catch-v0": {"low": 0, "high": 1}, "CartPole-v1": {"low": 0, "high": 10}}
    data = candidates(0.004, 0.002, 0.001, 0.003, 0.005, games=games)
    assert go(tmp_path, data, 5) == 0
    # Two go on whatever they score; from then on the best half, rounded up: 2 of 3, 2 of 4, 3 of 5.
    assert states(tmp_path) == {0: "complete", 1: "complete", 2: "pruned", 3: "complete", 4: "complete"}
    found = {int(row["trial"]): row for row in rows(tmp_path / "search")}
    assert [int(row["trial"]) for row in rows(tmp_path / "search")] == [4, 0, 3, 1, 2]
    # The last 1000 steps begin after the fourth of six lines, the 1000 before the rung at the start.
    assert float(found[4]["score"]) == pytest.approx((5 * (5 + 6) / 2 / 6) * (1 + 0.05) / 2)
    assert found[2]["score"] == ""
    assert float(found[2]["score_at_1000"]) == pytest.approx((1 * (1 + 2) / 2 / 6) * (1 + 0.05) / 2)
    assert go(tmp_path, data, 5) == 0  # nothing is left to do
    assert len(FakeChild.cores) == 10


def test_a_failed_trial_has_its_reason_and_the_search_goes_on(made_up, tmp_path, capsys):
    FakeChild.failures = {1: "The loss became NaN."}
    assert go(tmp_path, candidates(0.001, 0.002, 0.003), 3) == 0
    assert states(tmp_path) == {0: "complete", 1: "failed", 2: "complete"}
    assert rows(tmp_path / "search")[-1]["reason"] == "Catch-v0_seed1: The loss became NaN."
    assert "failed: Catch-v0_seed1: The loss became NaN." in capsys.readouterr().out


@pytest.mark.parametrize(("at_step", "state"), [(512, "failed"), (2048, "pruned")])
def test_a_run_that_fails_behind_a_rung_is_judged_there_first(made_up, tmp_path, monkeypatch, at_step, state):
    """Whether it is stopped or fails must not depend on when it is looked at."""
    original = FakeChild.__init__

    def fail_later(self, call, **options):
        original(self, call, **options)
        if Path(call[-1]).parent.name == "0002":
            file = Path(call[-1]) / "logs" / "PPO_Sequential" / "metrics.jsonl"
            file.write_text("".join(file.read_text().splitlines(keepends=True)[: at_step // 512]))
            self.status = 1

    monkeypatch.setattr(FakeChild, "__init__", fail_later)
    assert go(tmp_path, candidates(0.002, 0.003, 0.001), 3) == 0
    assert states(tmp_path)[2] == state


def test_a_combination_that_is_no_config_fails_without_training(made_up, tmp_path):
    data = SPACE | {"space": {"training.batch_size": [128, 100]}, "prune": []}
    data["candidates"] = [{"training.batch_size": 100}, {"training.batch_size": 128}]
    assert go(tmp_path, data, 2) == 0
    assert states(tmp_path) == {0: "failed", 1: "complete"}
    assert "training.batch_size = 100 does not divide the rollout" in rows(tmp_path / "search")[-1]["reason"]


def test_five_failures_from_the_start_end_the_search(made_up, tmp_path):
    FakeChild.failures = {number: f"reason {number}" for number in range(20)}
    data = candidates(0.001)
    with pytest.raises(TrainingFailedError, match=r"The first 5 trials failed.*Catch-v0_seed1: reason 4"):
        go(tmp_path, data, 20)
    assert len(states(tmp_path)) == 5
    FakeChild.failures = dict.fromkeys(range(6, 20), "again")
    assert go(tmp_path, data, 15) == 0  # trial 5 works: later failures do not end it
    assert list(states(tmp_path).values()).count("failed") == 14


def test_a_run_without_episodes_fails(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(Log, "mean_return", lambda *args: None)
    assert go(tmp_path, candidates(0.001), 1) == 0
    assert "no episode ended in the 1,000 steps before 1,000" in rows(tmp_path / "search")[0]["reason"]
    assert not (tmp_path / "search" / "best.yaml").exists()


def test_the_budget_begins_no_trial_that_would_not_be_done(made_up, tmp_path):
    assert go(tmp_path, candidates(0.001), None, seconds=1e-9) == 0
    assert states(tmp_path) == {}
    assert go(tmp_path, candidates(0.001), 2, seconds=3600) == 0
    study = Study.open(tmp_path / "search", None)
    study.save(study.trials()[0].model_copy(update={"seconds": 7200.0}))
    assert go(tmp_path, candidates(0.001), 4, seconds=3600) == 0
    assert len(states(tmp_path)) == 2


def test_a_changed_space_is_refused_by_the_key_that_differs(made_up, tmp_path, capsys):
    data = candidates(0.001)
    assert go(tmp_path, data, 1) == 0
    for other, difference in (
        (data | {"total_timesteps": 4000}, "base.training.total_timesteps is 3000 there, but 4000 here"),
        (candidates(0.002), "candidates is "),
        (data | {"seed": 1}, "seed is 0 there, but 1 here"),
        (data | {"space": data["space"] | {"training.gamma": [1]}}, "space.training.gamma.choices is missing there"),
    ):
        with pytest.raises(UserError, match="holds a search of another space: ") as error:
            go(tmp_path, other, 1)
        assert difference in str(error.value)
    assert go(tmp_path, None, 2) == 0  # without a space: that of the study
    assert len(states(tmp_path)) == 2


def test_directories_of_something_else_are_refused(tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "config.yaml").touch()
    with pytest.raises(UserError, match="holds a run"):
        go(tmp_path, SPACE, 1)
    (tmp_path / "search" / "config.yaml").unlink()
    (tmp_path / "search" / "trials" / "0000").mkdir(parents=True)
    (tmp_path / "search" / "trials" / "0000" / "trial.json").touch()
    with pytest.raises(UserError, match=r"holds trials, but no search\.yaml"):
        go(tmp_path, SPACE, 1)


@pytest.mark.parametrize("name", ["best.yaml", "trials.csv", "history.png", "importances.png"])
def test_results_replace_only_results(name, made_up, tmp_path, call):
    """Before the first trial; what the search has written itself is replaced."""
    mine = tmp_path / "search" / name
    mine.parent.mkdir()
    mine.write_text("mine")
    command = ("search", "--space", write(tmp_path), "--output-dir", mine.parent, "--trials")
    status, out, error = call(*command, 1)
    assert (status, mine.read_text()) == (2, "mine"), out
    assert f"{mine} would be replaced, and this program has not written it; move it away" in error
    mine.unlink()
    for number in (1, 2):
        status, _, error = call(*command, number)
        assert status == 0, error


def test_a_best_config_that_was_edited_stays_while_its_trial_is_the_best(made_up, tmp_path, call):
    command = (
        "search",
        "--space",
        write(tmp_path, candidates(0.002, 0.001, 0.005)),
        "--output-dir",
        tmp_path / "search",
    )
    assert call(*command, "--trials", 1)[0] == 0
    best = tmp_path / "search" / "best.yaml"
    edited = best.read_text() + "# mine\n"
    best.write_text(edited)
    status, out, _ = call(*command, "--trials", 2)
    assert (status, best.read_text()) == (0, edited)
    assert "best.yaml was edited and stays as it is" in out
    assert call(*command, "--trials", 3)[0] == 0
    assert best.read_text().startswith("# Trial 2 of `rlcb search`")


def test_a_damaged_plan_is_refused_in_a_sentence(made_up, tmp_path):
    assert go(tmp_path, candidates(0.001), 1) == 0
    file = tmp_path / "search" / "search.yaml"
    whole = yaml.safe_load(file.read_text())
    for key, value in (("base", {}), ("games", 3), ("space", {"training.gamma": {"low": 1}}), ("prune", None)):
        file.write_text(yaml.safe_dump(whole | {key: value}))
        with pytest.raises(UserError, match=r"search\.yaml"):
            go(tmp_path, None, 2)


def test_a_damaged_trial_is_named_and_trained_anew_once_it_is_removed(made_up, tmp_path):
    data = candidates(0.001, 0.002)
    assert go(tmp_path, data, 2) == 0
    file = tmp_path / "search" / "trials" / "0000" / "trial.json"
    file.write_text("{")
    with pytest.raises(UserError, match=r"trial\.json is damaged"):
        go(tmp_path, data, 3)
    for path in sorted(file.parent.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert go(tmp_path, data, 2) == 0
    assert states(tmp_path) == {0: "complete", 1: "complete"}


def test_a_trial_that_was_left_is_trained_anew_with_its_parameters(made_up, tmp_path):
    """Whoever took it is gone: the lock is free. What it had written of its runs goes."""
    space = read_space(write(tmp_path, candidates(0.001, 0.002)))
    study = Study.open(tmp_path / "search", space)
    left, held = study.take(9, suggest), study.take(9, suggest)
    left.trial.rungs[1000] = 5.0
    study.save(left.trial)
    left.release()
    (study.folder(0) / "Catch-v0_seed1").mkdir()
    (study.folder(0) / "Catch-v0_seed1" / "config.yaml").touch()
    assert go(tmp_path, None, 3) == 0
    assert states(tmp_path) == {0: "complete", 1: "running", 2: "complete"}  # the second one is held: nobody touches it
    first = study.trials()[0]
    assert (first.params, first.rungs[1000]) == (left.trial.params, pytest.approx((1 * 1.5 / 6 + 1) / 2))
    held.release()
    assert go(tmp_path, None, 3) == 0
    assert states(tmp_path)[1] == "complete"


def test_jobs_share_the_cores(made_up, tmp_path, monkeypatch):
    assert core_shares(1) == [None]
    cores = searching.detection.detect().physical_cores
    shares = core_shares(2)
    assert len(shares) == 2
    assert len(cores) < 2 or sorted([*shares[0], *shares[1]]) == list(cores)
    assert all(len(share) == 1 for share in core_shares(100))
    assert go(tmp_path, candidates(0.001, 0.002, 0.003, 0.004), 4, jobs=2) == 0
    assert set(states(tmp_path).values()) <= {"complete", "pruned"}
    assert len(FakeChild.cores) == 4


def test_the_progress_tells_the_time_that_is_left():
    made = [Trial(number=n, state="complete", params={}, score=n / 10, seconds=100.0) for n in range(4)]
    progress = SearchProgress([*made, Trial(number=4, params={})], limit=10, seconds=None, jobs=2)
    assert progress.status([0.5]) == "4 of 10 trials done, best 0.300 (trial 3), about 4m 35s left"
    assert (
        SearchProgress([], limit=None, seconds=60, jobs=1).status() == "0 trials done, no score yet, about 1m 00s left"
    )


def test_importances_name_the_parameter_that_matters(tmp_path):
    space = read_space(write(tmp_path, SPACE | {"prune": [], "startup_trials": 1000}))
    made = [trial for trial in ended(space, 80) if trial.state == "complete"]
    found = importances(space, made)
    assert next(iter(found)) == "training.learning_rate"
    assert sum(found.values()) == pytest.approx(1)
    assert importances(space, made[:11]) is None


# Several processes


def _take_all(space_file, directory, names):
    study = Study.open(Path(directory), read_space(space_file))
    while (claim := study.take(25, lambda space, number, trials: {"training.learning_rate": 1e-3})) is not None:
        names.put(claim.trial.number)
        time.sleep(random.random() * 0.02)
        claim.trial.state, claim.trial.score = "complete", 0.0
        study.save(claim.trial)
        claim.release()


def test_processes_never_take_the_same_trial(tmp_path):
    context = multiprocessing.get_context("fork")
    names = context.Queue()
    args = (write(tmp_path), str(tmp_path / "search"), names)
    processes = [context.Process(target=_take_all, args=args) for _ in range(4)]
    for process in processes:
        process.start()
    taken = sorted(names.get(timeout=60) for _ in range(25))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert taken == list(range(25))
    assert names.empty()


# Searches that train


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The directory of a search that was not interrupted; search.log holds what it printed."""

    def make(folder):
        done = rlcb("search", "--space", write(folder), "--trials", 4, "--output-dir", folder / "search")
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "search" / "search.log").write_text(done.stdout)

    return made_once(tmp_path_factory, "searched", make) / "search"


def outcome(directory):
    """All but the times, which differ."""
    found = Study.open(directory, None).trials()
    return [trial.model_dump(exclude={"seconds"}) for trial in found]


def test_the_results_of_a_search(searched, tmp_path):
    printed = (searched / "search.log").read_text()
    assert "Trial 0: learning_rate 0.0003" in printed
    assert "There are too few trials to say which parameters matter: 12 are needed" in printed
    assert (searched / "history.png").read_bytes().startswith(b"\x89PNG")
    found = rows(searched)
    best = found[0]
    assert sorted(int(row["trial"]) for row in found) == list(range(4))
    assert best["state"] == "complete"
    assert float(best["score"]) == max(float(row["score"]) for row in found if row["score"])
    config = configs.load(searched / "best.yaml")
    assert config.training.learning_rate == float(best["training.learning_rate"])
    assert (config.env.name, config.env.seed, config.training.total_timesteps) == ("Catch-v0", 1, 3000)
    done = rlcb("train", "--config", searched / "best.yaml", "--output-dir", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    trial = load_run(searched / "trials" / f"{int(best['trial']):04}" / "Catch-v0_seed1")
    again = load_run(tmp_path / "again")
    assert trial.state == again.state == "finished"
    assert again.series["charts/return_sum"].tolist() == trial.series["charts/return_sum"].tolist()
    log = Log(trial.path / "logs" / "PPO_Sequential" / "metrics.jsonl")
    log.read()
    assert float(best["score"]) == pytest.approx((log.mean_return(1000) + 1) / 2)


def start(folder, directory):
    call = ["search", "--space", write(folder), "--trials", 4, "--output-dir", directory]
    return Command(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)


def end_while_training(process, directory, number, order):
    """Send a signal while a trial trains; returns the processes that trained it."""
    try:
        end = time.monotonic() + 120
        while not is_running(directory / "trials" / f"{number:04}" / "Catch-v0_seed1"):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(order)
        process.wait(60)
        return children
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.timeout(600)
def test_killed_and_interrupted_it_ends_with_the_same_trials(searched, tmp_path):
    """SIGKILL during trial 1, Ctrl-C during trial 3: each is trained anew with the same parameters."""
    directory = tmp_path / "search"
    process = start(tmp_path, directory)
    children = end_while_training(process, directory, 1, signal.SIGKILL)
    assert outcome(directory)[1]["state"] == "running"
    end = time.monotonic() + 60
    while any(is_alive(child) for child in children):
        assert time.monotonic() < end
        time.sleep(0.05)
    process = start(tmp_path, directory)
    children = end_while_training(process, directory, 3, signal.SIGINT)
    assert process.returncode == 128 + signal.SIGINT
    assert not any(is_alive(child) for child in children)
    assert [trial["state"] for trial in outcome(directory)][3:] == ["running"]
    done = rlcb("search", "--output-dir", directory, "--trials", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trial 3, which was left unfinished, anew: " in done.stdout
    assert outcome(directory) == outcome(searched)
    assert (directory / "best.yaml").read_bytes() == (searched / "best.yaml").read_bytes()


@pytest.mark.long
def test_two_searches_at_once_share_a_study(tmp_path):
    directory = tmp_path / "search"
    processes = [start(tmp_path, directory) for _ in range(2)]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all(trial["state"] in ("complete", "pruned") for trial in outcome(directory))
    for number in range(4):
        assert sum(f"\nTrial {number}: learning_rate" in f"\n{text}" for text in printed) == 1
    assert len(rows(directory)) == 4


def test_a_terminal_has_a_bar(searched, needs_pty):
    """On a terminal: trials done, the best, the time left."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (40, 160))
    call = [sys.executable, "-m", "rl_cluster_benchmark", "search", "--output-dir", searched, "--trials", "4"]
    done = subprocess.run(call, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=theirs, check=False)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a pseudo terminal
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert done.returncode == 0
    assert "4 of 4 trials done, best 0." in shown.decode()
