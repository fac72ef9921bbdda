"""`rlcb tune`: a space that leaves learning alone, a search that noise does not fool, a command that keeps its time."""

import json
import random
import signal
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
from helpers.commands import ROOT, environment, rlcb
from helpers.forked import Command

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.cli.performance_commands import _given_keys
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.kernels import native_network
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate
from rl_cluster_benchmark.tools.tune import tuning_report
from rl_cluster_benchmark.tools.tune.tuning import TuningSettings, make_space
from rl_cluster_benchmark.tools.tune.tuning_search import choose, of_best, search, sweep
from rl_cluster_benchmark.tools.tune.tuning_space import TuningSpace, resolve_envs
from rl_cluster_benchmark.tools.tune.tuning_trials import TuningTrial, short_updates

MACHINE = replace(
    detection.detect(), usable_cores=16, allowed_cores=16, physical_cores=tuple(range(16)), cpu_quota=None,
    flags=frozenset({"avx512_bf16"}),
)  # fmt: skip
TINY = ("--env", "Catch-v0", "--num-envs", 16, "--batch-size", 128, "--set", "training.n_steps=32")
QUICK = (*TINY, "--mode", "sequential", "--seconds", 0.2, "--budget", 90)  # one setting for each number of threads


@pytest.fixture
def big_machine(monkeypatch):
    """16 cores with AVX512-BF16, where the C code is compiled."""
    monkeypatch.setattr(detection, "detect", lambda: MACHINE)
    monkeypatch.setattr(native_network, "available", lambda architecture, precision="float32": precision == "float32")


def make(preset, **changes):
    config = config_files.load(preset, {key.replace("__", "."): value for key, value in changes.items()})
    return TuningSpace(resolve_envs(config, MACHINE), MACHINE)


def learning(config):
    """Everything that decides what is learned."""
    data = config_files.to_dict(config)
    asynchronous = config.algorithm == "impala"
    workers = data["parallel"]["num_workers"] if config.algorithm == "a3c" else None
    batch = config.unrolls_per_step if asynchronous else config.batch_size
    return {name: data[name] for name in ("algorithm", "env", "model", "training")} | {
        "batch": batch,
        "workers": workers,
        "rollout": config.rollout_size,
    }


@pytest.mark.parametrize("preset", ["ppo_procgen_paper", "ppo_parallel", "a2c_parallel", "a3c_parallel", "ppo_toy"])
def test_every_setting_leaves_the_learning_problem_alone(preset, big_machine):
    toy = {"env__name": "Catch-v0"} if preset == "ppo_toy" else {}
    space = make("ppo_sequential" if toy else preset, **toy)
    before = learning(space.tuned(space.default))
    assert before["env"]["num_envs"] == config_files.load("ppo_sequential" if toy else preset).env.num_envs
    assert len(space.settings) > 3
    assert len(set(space.settings)) == len(space.settings), "each once"
    for setting in space.settings:
        assert learning(space.tuned(setting)) == before
        assert setting.learning == ()


def test_what_there_is_to_choose_from(big_machine):
    settings = make("ppo_procgen_paper").settings
    assert {(s.layout.workers, s.layout.threads) for s in settings} == {(16, 1), (8, 2), (4, 4), (1, 16)}
    assert {(s.precision, s.engine) for s in settings} == {("float32", "native"), ("bfloat16", "torch")}
    assert {s.micro_batch for s in settings if s.layout.threads == 1} == {32, 64, 128}
    assert {s.balance for s in settings} == {None, 0.0, 0.25, 0.5}
    fewer = make("ppo_procgen_paper", hardware__precision="float32").settings
    assert {s.precision for s in fewer} == {"float32"}, "a precision in the file is a decision"


def test_splits_of_impala_keep_the_batch(big_machine):
    changes = {"mode": "parallel", "parallel.num_workers": 5, "impala.num_learners": 11, "impala.num_actors": None}
    config = config_files.load("impala_procgen", changes)
    space = TuningSpace(config, MACHINE)
    splits = {(s.layout.workers, s.layout.learners): space.tuned(s).unrolls_per_step for s in space.settings}
    assert splits[5, 11] == 33, "the config as it is: 32 rounded to shares of 11"
    assert {(14, 2), (12, 4), (8, 8)} <= set(splits)
    assert set(splits.values()) == {32, 33}
    free = TuningSpace(config, MACHINE, learning_too=True)
    changed = [s for s in free.settings if s.layout.learners == 10 and s.layout.num_envs == 64]
    assert changed
    assert all(s.learning == ("batch 32 -> 30 unrolls",) for s in changed)
    assert "changes what is learned: batch 32 -> 30" in tuning_report.learning_sentence(free, changed[0])


def test_changes_of_learning_are_asked_for_and_said(big_machine):
    config = config_files.load("a3c_parallel")
    assert {s.layout.workers for s in TuningSpace(config, MACHINE).settings} == {16}
    space = TuningSpace(config, MACHINE, learning_too=True)
    by_layout = {(s.layout.workers, s.layout.num_envs): s.learning for s in space.settings}
    assert by_layout[16, 64] == ()
    assert by_layout[8, 64] == ("A3C's workers 16 -> 8",)
    assert by_layout[16, 128] == ("environments 64 -> 128",)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"mode": "sequential"}, lambda s: s.layout.mode == "sequential"),
        ({"hardware.precision": "bfloat16"}, lambda s: s.precision == "bfloat16"),
        ({"hardware.precision": "auto"}, lambda s: (s.precision == "float32") == (s.engine == "native")),
        ({"mode": "parallel", "parallel.num_workers": 16}, lambda s: s.layout.workers == 16),
        ({"hardware.micro_batch": 96}, lambda s: s.micro_batch == 96),
    ],
)
def test_what_the_command_line_says_stays(changes, check, big_machine, tmp_path):
    config = config_files.load("ppo_procgen_paper", changes)
    space = make_space(config, TuningSettings(300, 4, tmp_path, False, given=set(changes)))
    assert len(space.settings) > 2
    assert all(check(setting) for setting in space.settings)


def test_a_key_that_the_command_line_sets_by_its_old_name_stays():
    keys = [
        _given_keys(main.build_parser().parse_args(["tune", "--set", f"{section}.num_threads=2"]))
        for section in ("hardware", "training")
    ]
    assert keys[0] == keys[1] == {"hardware.num_threads"}


def test_short_updates_do_the_same_work_for_each_step():
    long = config_files.load("ppo_procgen_paper")
    short = short_updates(long)
    assert (short.training.n_steps, short.batch_size, short.env.num_envs) == (32, 2048, 64)
    same = short.model_copy(update={"training": short.training.model_copy(update={"n_steps": 256})})
    assert same == long
    for preset in ("a2c_parallel", "impala_procgen"):
        assert short_updates(config_files.load(preset)) == config_files.load(preset)


class PretendedMachine:
    """Trials that take ten seconds each, of settings whose speeds are known but for noise and drift."""

    def __init__(self, space, seed, budget):
        self.random, self.tried, self.now, self.budget, self.count = random.Random(seed), {}, 0.0, budget, 0
        factor = {
            group: self.random.uniform(0.02, 0.3) for group in ("layout", "precision", "engine", "micro", "share")
        }
        self.speeds = {}
        for setting in space.settings:  # a hidden optimum, and interactions that a search by groups does not know
            choice = {
                "layout": (setting.layout.workers * 7 + seed) % 5, "precision": setting.precision == "float32",
                "engine": setting.engine == "torch", "micro": (setting.micro_batch // 32 + seed) % 3,
                "share": (int(10 * (setting.balance or 0)) + seed) % 3,
            }  # fmt: skip
            speed = 1000.0
            for name, value in choice.items():
                speed *= 1 - factor[name] * int(value) / 4
            self.speeds[setting] = speed * self.random.uniform(0.98, 1.02)
        self.best = max(self.speeds.values())

    def affordable(self, until=None):
        return self.now + 12 < (until or self.budget)

    def run(self, setting):
        self.now += 10
        self.count += 1
        drift = 1 - 0.05 * self.now / self.budget
        fps = self.speeds[setting] * drift * self.random.gauss(1, 0.02)
        trial = self.tried.setdefault(setting, TuningTrial(setting))
        trial.rates.append(Rate(fps, 1, 4.0, {}, 1.0, {}))
        return trial


def test_the_search_comes_within_five_percent_of_the_best(big_machine):
    space = make("ppo_procgen_paper")
    shares = []
    for seed in range(40):
        machine = PretendedMachine(space, seed, budget=300)
        search(space, machine, lambda trial: None, finals_at=210)
        chosen = choose(space, list(machine.tried.values()))
        assert machine.now <= 300
        assert len(machine.tried) < len(space.settings) / 2, "it does not try everything"
        shares.append(machine.speeds[chosen.setting] / machine.best)
    assert sum(share >= 0.95 for share in shares) >= 36, sorted(shares)
    assert min(shares) > 0.9


def test_an_exhaustive_sweep_compares_in_turns(big_machine):
    space = make("ppo_procgen_paper")
    machine = PretendedMachine(space, 3, budget=10_000)
    ranked = sorted(space.settings, key=lambda setting: machine.speeds[setting])
    slow = ranked[0]
    duel = sweep(space, machine, lambda trial: None, slow)
    assert set(machine.tried) == set(space.settings)
    assert slow in duel
    assert {len(speeds) for speeds in duel.values()} == {3}
    assert of_best(duel, slow) == pytest.approx(machine.speeds[slow] / machine.best, abs=0.06)


def test_equals_change_nothing(big_machine):
    """Of settings that are as fast, the one nearest to the config is taken; a single lucky trial decides nothing."""
    space = make("ppo_procgen_paper")
    tried = [TuningTrial(setting) for setting in space.settings[:4]]
    for trial, speeds in zip(tried, ([995, 997, 996], [1000, 1001, 999], [900, 900, 910], [2000]), strict=True):
        trial.rates = [Rate(fps, 1, 4.0, {}, 1.0, {}) for fps in speeds]
    assert choose(space, tried).setting == space.default
    assert choose(space, tried[1:3]).setting == space.settings[1]
    assert choose(space, []) is None
    assert not any("Warning" in line for line in tuning_report.sentences(space, tried, tried[0]))
    for others, words in (
        (tried[2:3], "nothing tried was faster."),
        (tried[1:3], "nothing tried was more than 1% faster."),
        (tried[1:], "came to 2,000 steps/s, but in too few trials to be chosen (1 trial against 3)"),
    ):
        assert words in tuning_report.sentences(space, [tried[0], *others], tried[0])[1]
    tried[0].rates.append(Rate(700, 1, 4.0, {}, 1.0, {}))
    assert "Warning: its trials differ by 15%" in tuning_report.sentences(space, tried, tried[0])[-1]


def test_a_search(tmp_path):
    output = tmp_path / "out"
    done = rlcb("tune", *QUICK, "--num-threads", 1, "--output-dir", output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(file.name for file in output.iterdir()) == [".lock", "tune.json", "tuned.yaml"]
    found = json.loads((output / "tune.json").read_text())
    assert [len(trial["fps"]) for trial in found["trials"]] == [2]
    assert found["chosen"] in done.stdout
    assert "The learning problem is as it was (16 environments x 32 steps, batches of 128 samples)" in done.stdout
    again = rlcb("tune", *QUICK, "--output-dir", output)
    assert again.returncode == 2
    assert "already holds a tuned config; add --overwrite" in again.stderr
    trained = rlcb(
        "train", "--config", output / "tuned.yaml", "--total-timesteps", 1000, "--output-dir", tmp_path / "run"
    )
    assert trained.returncode == 0, trained.stderr
    config = config_files.load(tmp_path / "run" / "config.yaml")
    assert (config.env.num_envs, config.training.n_steps, config.batch_size) == (16, 32, 128)
    assert tuning_report.name(make_space(config, TuningSettings(1, 1, tmp_path, False)).default) == found["chosen"]


def test_an_interruption_writes_the_best_so_far(tmp_path):
    call = ["tune", *QUICK, "--output-dir", tmp_path]
    settings = min(2, detection.detect().usable_cores)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = Command(call, cwd=ROOT, env=environment(), text=True, **pipes)
    try:
        text = ""
        while text.count("steps/s") < settings:
            text += (line := process.stdout.readline())
            assert line, text
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, text
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert "Chosen: " in text
    assert "Traceback" not in text
    assert config_files.load(tmp_path / "tuned.yaml").env.num_envs == 16
    trials = json.loads((tmp_path / "tune.json").read_text())["trials"]
    assert len(trials) == settings
    assert trials[0]["fps"] >= trials[-1]["fps"], "the fastest first"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--budget", "0"), "--budget: 0 is not allowed"),
        (("--seconds", "x"), "--seconds: x is not allowed"),
        (("--mode", "distributed"), "rlcb tune measures one machine"),
        (("--set", "hardware.device=cuda", "--mode", "sequential"), "rlcb tune is about CPUs"),
        (("--env", "pong"), "not a known environment"),
        (("--num-envs", "7"), "does not divide the rollout"),
        (("--duration", "1"), "unrecognized arguments: --duration"),
    ],
)
def test_wrong_inputs(args, text, tmp_path):
    done = rlcb("tune", *TINY, "--output-dir", tmp_path / "out", *args)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_budget_that_is_too_small(tmp_path):
    started = time.monotonic()
    done = rlcb("tune", *QUICK, "--budget", 0.3, "--output-dir", tmp_path)
    assert done.returncode == 1
    assert time.monotonic() - started < 60, "no trial goes on beyond it"
    assert done.stderr.startswith("error: Nothing was measured (stopped after")
    assert "A larger --budget" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
