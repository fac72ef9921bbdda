"""`rlcb scaling`: the same work together and apart, figures that follow from the runs, nothing left behind."""

import csv
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from helpers.commands import ROOT, environment, rlcb
from helpers.forked import Command

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.machine import detection, planning
from rl_cluster_benchmark.tools.scaling import results
from rl_cluster_benchmark.tools.scaling.cases import MEASURED, choose_counts, make_cases
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate, TrainingProcess, measure_in_turns
from rl_cluster_benchmark.tools.scaling.results import Round

TINY = ("--env", "Catch-v0", "--batch-size", 128, "--set", "training.n_steps=32", "--set", "parallel.pin=never")
COUNTS = [1, 2][: detection.detect().usable_cores]
MACHINE = replace(detection.detect(), usable_cores=16, physical_cores=tuple(range(16)))


def call(*args):
    return ["scaling", *TINY, "--workers", "1,2", "--seconds", 0.5, *args]


@pytest.fixture
def start(tmp_path):
    """Start a sweep; whatever the test does, it is gone afterwards."""
    started = []

    def start_sweep(*args):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = Command(call("--output-dir", tmp_path, *args), cwd=ROOT, env=environment(), text=True, **pipes)
        started.append(process)
        return process

    yield start_sweep
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, process, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_gone(processes):
    """A process that is still importing sees that its parent is gone when it is done with that."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


@pytest.mark.parametrize("envs_per_worker", [None, 4])
@pytest.mark.parametrize("pin", ["auto", "never"])
def test_an_independent_run_does_what_a_worker_does(envs_per_worker, pin, monkeypatch):
    changes = {"mode": "parallel", "parallel.pin": pin, "training.target_kl": 0.01}
    config = config_files.load("ppo_procgen_paper", changes)
    for case in make_cases(config, [1, 2, 8, 16], envs_per_worker, MACHINE):
        seen = replace(MACHINE, usable_cores=case.workers, physical_cores=case.cores)  # by the workers together
        monkeypatch.setattr(detection, "detect", lambda machine=seen: machine)
        together, plan = planning.resolve(case.together)
        assert plan.num_workers == case.workers == len(case.cores)
        assert together.env.num_envs == case.num_envs == (64 if envs_per_worker is None else 4 * case.workers)
        assert together.training.target_kl is None, "it would end some updates early"
        assert len(case.independents) == case.workers
        assert len({run.env.seed for run in case.independents}) == case.workers
        pinned_to = [set(case.cores) if core is None else {core} for core in plan.cores]
        assert case.core_sets() == pinned_to, "the same cores, in the same way"
        assert (plan.cores[0] is None) == (pin == "never")
        assert together.rollout_size / together.batch_size == 8, "as many optimiser steps, however many workers"
        for run in case.independents:
            assert run.mode == "sequential"
            own = planning.plan(run)
            assert (own.micro_batch, own.num_threads) == (plan.micro_batch, plan.num_threads)
            assert own.precision == plan.precision
            assert run.env.num_envs * case.workers == case.num_envs
            assert run.batch_size * case.workers == together.batch_size
            assert run.rollout_size / run.batch_size == 8
            assert run.training.n_epochs == together.training.n_epochs == 3


def test_the_total_is_that_of_the_training_command():
    """A preset with environments per worker: what `rlcb train` would have in all."""
    config = config_files.load("ppo_parallel")
    assert (config.parallel.num_workers, config.parallel.num_envs_per_worker) == (4, 8)
    assert {case.num_envs for case in make_cases(config, [1, 2], None, MACHINE)} == {32}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"env.num_envs": 9, "training.batch_size": 1152}, "9 environments cannot be shared evenly by 2 workers"),
        ({"env.num_envs": 2, "training.n_steps": 9, "training.batch_size": 9}, "be cut into 2 equal minibatches"),
        ({"env.num_envs": 2, "training.n_steps": 9, "training.batch_size": 4}, "does not divide the rollout"),
    ],
)
def test_unequal_work_is_refused(changes, text):
    config = config_files.load(None, {"mode": "parallel", "env.name": "Catch-v0", **changes})
    with pytest.raises(UserError, match=text):
        make_cases(config, [1, 2], None, MACHINE)


def test_numbers_of_workers():
    assert choose_counts(None, MACHINE) == ([1, 2, 4, 8, 16], [])
    assert choose_counts([4, 2, 4], MACHINE) == ([1, 2, 4], []), "one worker is what the others are compared with"
    assert choose_counts([32, 2], MACHINE) == ([1, 2], [32])
    with pytest.raises(UserError, match="16 is the most"):
        choose_counts([17], MACHINE)


def rate(fps, waiting=0.0, busy=1.0):
    shares = {"communication": 0.01, "waiting": waiting}
    return Rate(fps, 3, 10.0, shares, busy, {"memory_per_worker_mb": 300 + fps})


def test_figures_of_rounds():
    cases = [SimpleNamespace(workers=n, num_envs=8, envs_per_worker=8 // n) for n in (1, 2, 4)]
    rounds = [
        [Round(rate(100), [rate(100)]), Round(rate(90), [rate(100)]), Round(rate(110), [rate(110)])],
        [Round(rate(150, 0.3), [rate(100), rate(80, busy=0.5)]), Round(rate(160, 0.1), [rate(100), rate(100)])],
        [],
    ]
    one, two = results.make_rows(cases, rounds)
    assert (one["fps"], one["independent_fps"], one["of_machine"]) == (100, 100, 1.0), "medians"
    assert (two["fps"], two["independent_fps"], two["waiting"]) == (155, 190, pytest.approx(0.2))
    assert two["of_machine"] == pytest.approx((150 / 180 + 160 / 200) / 2), "of each round by itself"
    assert two["of_slowest"] == pytest.approx((160 / 180 + 1) / 2)
    assert (two["speedup"], two["efficiency"]) == (1.55, 0.775)
    assert (two["independent_speedup"], two["independent_efficiency"]) == (1.9, 0.95)
    assert two["memory_per_worker_mb"] == 460
    assert "independent runs of 2 had 75% of a core" in results.disturbed([one, two])
    assert results.disturbed([one]) is None
    assert [line.split()[0] for line in results.table([one, two]).splitlines()[2:]] == ["1", "2"]


def test_a_sweep(tmp_path):
    output = tmp_path / "out"
    done = rlcb(*call("--num-envs", 16, "--workers", "1,2,4000", "--output-dir", output))
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in output.iterdir()) == [".lock", "scaling.csv", "scaling.json", "scaling.png"]
    assert "usable cores: 4000 workers" in done.stdout.replace(" 2, 4000", " 4000")
    assert "strong: 16 environments in all" in done.stdout
    report = json.loads((output / "scaling.json").read_text())
    assert (report["algorithm"], report["scaling"], report["complete"]) == ("PPO", "strong", True)
    assert [row["workers"] for row in report["rows"]] == COUNTS
    for row in report["rows"]:
        assert row["num_envs"] == 16
        assert [len(r["independent_fps"]) for r in row["rounds"]] == [row["workers"]]
        assert row["speedup"] == pytest.approx(row["fps"] / report["rows"][0]["fps"])
        assert row["fps"] > 0
        assert row["updates"] >= 1
        assert 30 < row["memory_per_worker_mb"] < 1000
        assert sum(row["rounds"][0]["phase_shares"].values()) == pytest.approx(1.0)
        assert f"{row['fps']:,.0f}" in done.stdout
    with (output / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["fps"]) for row in rows] == [row["fps"] for row in report["rows"]]
    assert (output / "scaling.png").read_bytes().startswith(b"\x89PNG")
    again = rlcb(*call("--output-dir", output))
    assert again.returncode == 2
    assert "already holds a sweep; add --overwrite" in again.stderr


@pytest.mark.long
def test_weak_scaling_of_another_algorithm(tmp_path):
    done = rlcb(
        *call("--algorithm", "a2c", "--envs-per-worker", 4, "--workers", 1, "--repeats", 2, "--output-dir", tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "weak: 4 environments for each worker" in done.stdout
    report = json.loads((tmp_path / "scaling.json").read_text())
    assert (report["algorithm"], report["scaling"]) == ("A2C", "weak")
    assert [(row["num_envs"], len(row["rounds"])) for row in report["rows"]] == [(4, 2)]


def test_an_interruption_keeps_what_is_finished(start, tmp_path):
    process = start("--num-envs", 16, "--seconds", 1, "--repeats", 50)
    until((tmp_path / "scaling.json").exists, process)
    until(lambda: psutil.Process(process.pid).children(), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT, text
    assert_gone(family)
    report = json.loads((tmp_path / "scaling.json").read_text())
    assert report["complete"] is False
    assert report["rows"][0]["workers"] == 1
    assert "1 worker, round 1 of 50: together" in text
    assert "of machine" in text
    assert "Traceback" not in text
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "scaling.csv", "scaling.json", "scaling.png"]


def test_a_killed_sweep_leaves_no_process(start, tmp_path):
    process = start("--num-envs", 16, "--seconds", 60)
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 2, process)  # the run and its worker
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(list(tmp_path.glob(".scaling-runs-*"))) == 1
    process.kill()
    process.communicate()
    assert_gone(family)
    done = rlcb(*call("--num-envs", 16, "--workers", 1, "--set", "model.architecture=nature", "--output-dir", tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: model.architecture = nature needs images, but observations have shape (10, 5); use mlp or auto."
    ]
    assert [file.name for file in tmp_path.iterdir()] == [".lock"], "and the next sweep removes its files"


def test_runs_that_are_compared_take_turns(tmp_path):
    """One of the two trains, the other is stopped; each has three turns, whose first update does not count."""
    changes = {"env.name": "Catch-v0", "env.num_envs": 4, "training.n_steps": 32, "hardware.num_threads": 1}
    config = config_files.load(None, MEASURED | changes)
    at_once, others = [], set(psutil.Process().children())

    def look():
        children = set(psutil.Process().children()) - others
        runs = [run for run in children if "train" in run.cmdline()]
        at_once.append((len(runs), sum(run.status() != psutil.STATUS_STOPPED for run in runs)))
        return False

    groups = [([config], [os.sched_getaffinity(0)], tmp_path / name) for name in ("a", "b")]
    (first,), (second,) = measure_in_turns(groups, seconds=3.0, interrupted=look)
    assert set(at_once) <= {(1, 1), (2, 1), (2, 2)}
    assert at_once.count((2, 2)) <= 7, "the moment in which one is being stopped, at the start of a turn"
    assert at_once.count((2, 1)) >= 12
    for rate in (first, second):
        assert len(rate.update_seconds) == rate.updates
        assert rate.seconds == pytest.approx(sum(rate.update_seconds))
        assert 2 < rate.seconds < 4
        assert max(rate.update_seconds) < 1, "no pause is in them"


def test_a_run_is_pinned_from_its_start(tmp_path):
    core = max(os.sched_getaffinity(0))
    config = config_files.load(None, {"env.name": "Catch-v0"})
    run = TrainingProcess(config, {core}, tmp_path / "run")
    try:
        assert os.sched_getaffinity(run.process.pid) == {core}
    finally:
        run.kill()
    assert run.process.returncode == -signal.SIGKILL
    assert "was killed by SIGKILL" in str(run.failure())


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--workers", "0,1"), "--workers: 0 is not allowed"),
        (("--workers", "two"), "--workers: two is not allowed"),
        (("--workers", "9999"), "--workers starts at 9999"),
        (("--seconds", "0"), "--seconds: 0 is not allowed"),
        (("--seconds", "nan"), "--seconds: nan is not allowed"),
        (("--repeats", "0"), "--repeats: 0 is not allowed"),
        (("--num-envs", "8", "--envs-per-worker", "4"), "give one"),
        pytest.param(
            ("--num-envs", "3", "--batch-size", "96"),
            "3 environments cannot be shared evenly by 2 workers",
            marks=pytest.mark.skipif(len(COUNTS) < 2, reason="two workers need two cores"),
        ),
        (("--env", "pong"), "not a known environment"),
        (("--num-threads", "2"), "hardware.num_threads = 2 must be 1"),
        (("--num-workers", "2"), "unrecognized arguments: --num-workers"),
    ],
)
def test_wrong_inputs(args, text, tmp_path):
    done = rlcb(*call("--output-dir", tmp_path / "out", *args))
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
