"""Run directories in every state: running, finished, interrupted, failed, empty, old, damaged, hostile."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
from helpers.commands import ROOT, TINY, environment, rlcb, tiny_run
from helpers.forked import Command
from helpers.run_copies import copy_run, edit_json

from rl_cluster_benchmark.config.config_files import load
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.analysis.runs import (
    LeftOut,
    UnusableRunError,
    find_runs,
    is_run,
    is_running,
    load_run,
    load_runs,
)
from rl_cluster_benchmark.tools.dashboard.state import Directory


def start(output, *args):
    call = ["train", *TINY, "--total-timesteps", 100_000_000, "--output-dir", output, *args]
    return Command(call, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_updates(path):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if len(load_run(path).series["step"]) > 2:
                return
        except UnusableRunError:
            pass
        time.sleep(0.1)
    raise AssertionError("the run does not start")


def test_a_finished_run(cells):
    run = load_run(cells["a2c_parallel"])
    assert (run.algorithm, run.mode, run.game, run.seed, run.state) == ("A2C", "parallel", "Catch-v0", 1, "finished")
    assert run.summary.total_timesteps >= 6000
    assert run.series["step"][-1] == run.summary.total_timesteps
    assert run.evaluations["all"].num_episodes == 20


def test_running_then_interrupted_then_killed(tmp_path):
    process = start(tmp_path / "run")
    try:
        wait_for_updates(tmp_path / "run")
        run = load_run(tmp_path / "run")
        assert run.state == "running"
        assert run.summary.total_timesteps == run.series["step"][-1] > 0
        assert run.summary.avg_fps > 0
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        run = load_run(tmp_path / "run")
        assert (run.state, run.reason) == ("interrupted", "signal 2")
        process = start(tmp_path / "run", "--resume")
        end = time.monotonic() + 60
        while load_run(tmp_path / "run").series["update"][-1] <= run.summary.total_updates and time.monotonic() < end:
            time.sleep(0.1)
        process.kill()
        process.wait()
        killed = load_run(tmp_path / "run")
        assert killed.state == "interrupted"
        assert "killed" in killed.reason
        assert killed.summary.total_updates > run.summary.total_updates  # of the log, not of the older summary
    finally:
        process.kill()
        process.wait()


def test_a_failed_run_says_why(tmp_path):
    done = tiny_run(tmp_path / "run", "--learning-rate", "1e30", "--set", "training.max_grad_norm=1e30")
    assert done.returncode == 1
    run = load_run(tmp_path / "run")
    assert run.state == "failed"
    assert "NaN or infinite" in run.reason
    listed = rlcb("runs", tmp_path)
    assert "failed: " in listed.stdout
    assert "NaN or infinite" in listed.stdout


def test_looking_at_a_run_does_not_keep_it_from_starting(tmp_path):
    """Whoever looks holds the lock for a moment; a run that starts just then tries again."""
    directory = RunDirectory.of(load(None, {"output_dir": str(tmp_path)}))
    directory.claim(may_hold_a_run=False).release()
    looker = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    threading.Timer(0.02, os.close, [looker]).start()
    directory.claim(may_hold_a_run=False).release()


def damage(cells, tmp_path):
    """name -> (what is done to a copy of a good run, what the reason must say)."""
    good = cells["ppo_sequential"]

    def copied(name):
        return copy_run(good, tmp_path / name)

    (tmp_path / "empty").mkdir()
    yield "empty", "holds no run"
    (copied("no_config") / "config.yaml").unlink()
    yield "no_config", "older format"
    (copied("old_key") / "config.yaml").write_text("env: {max_episode_steps: 1}\n")
    yield "old_key", "env.max_episode_steps is not a known key"
    (copied("bad_yaml") / "config.yaml").write_bytes(b"\xff\x00: [")
    yield "bad_yaml", "config.yaml is damaged"
    (copied("cut_summary") / "training_summary.json").write_text('{"algorithm": "PPO", "st')
    yield "cut_summary", "training_summary.json is damaged"
    edit_json(copied("old_summary") / "training_summary.json", avg_fps="fast")
    yield "old_summary", "training_summary.json is damaged or of an older format (avg_fps"
    edit_json(copied("nan") / "training_summary.json", avg_fps=float("nan"))
    yield "nan", "training_summary.json is damaged"
    edit_json(copied("mixed") / "training_summary.json", env="procgen-maze-v0")
    yield "mixed", "different runs"
    next(copied("garbage").rglob("metrics.jsonl")).write_bytes(os.urandom(5000))
    yield "garbage", "metrics.jsonl is damaged"
    next(copied("no_update").rglob("metrics.jsonl")).write_text("")
    edit_json(tmp_path / "no_update" / "training_summary.json", state="interrupted", reason="signal 15")
    yield "no_update", "no update is in its log"
    edit_json(copied("stopped") / "training_summary.json", state="interrupted", reason="signal 15")
    yield "stopped", "interrupted (signal 15); --unfinished takes it in"
    (tmp_path / "file").write_text("x")
    yield "file", "is a file"
    yield "nowhere", "does not exist"


def test_what_cannot_be_compared_is_named_with_the_reason(cells, tmp_path):
    expected = dict(damage(cells, tmp_path))
    paths = [tmp_path / name for name in expected]
    runs, left_out = load_runs([cells["a2c_sequential"], *paths])
    assert [run.path for run in runs] == [cells["a2c_sequential"]]
    reasons = {item.path.name: item.reason for item in left_out}
    assert reasons.keys() == expected.keys()
    for name, text in expected.items():
        assert text in reasons[name], name
    done = rlcb("compare", cells["a2c_sequential"], *paths)
    assert done.returncode == 0, done.stderr
    for name in expected:
        assert str(tmp_path / name) in done.stdout
    done = rlcb("compare", *paths)
    assert done.returncode == 2
    assert "There is nothing to compare. Left out:" in done.stderr
    assert "Traceback" not in done.stderr
    assert load_runs([tmp_path / "stopped"], unfinished=True)[0][0].state == "interrupted"


def test_files_that_lead_outside_are_not_read(cells, tmp_path):
    secret = tmp_path / "secret.jsonl"
    shutil.copy(next(cells["ppo_sequential"].rglob("metrics.jsonl")), secret)
    run = copy_run(cells["ppo_sequential"], tmp_path / "runs" / "linked")
    log = next(run.rglob("metrics.jsonl"))
    log.unlink()
    log.symlink_to(secret)
    with pytest.raises(UnusableRunError, match="leads outside"):
        load_run(run)
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to("/etc/hostname")
    with pytest.raises(UnusableRunError, match="leads outside"):
        load_run(run)
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")  # would wait for ever
    with pytest.raises(UnusableRunError, match="no plain file"):
        load_run(run)
    (tmp_path / "runs" / "link_to_run").symlink_to(cells["ppo_sequential"])
    assert [path.name for path in find_runs(tmp_path / "runs")] == ["linked"]


def test_a_config_that_stands_for_gigabytes_is_refused(cells, tmp_path):
    run = copy_run(cells["ppo_sequential"], tmp_path / "run")
    layers = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12))
    (run / "config.yaml").write_text(f"a0: &a0 [x]\n{layers}")
    start = time.perf_counter()
    with pytest.raises(UnusableRunError, match=r"config\.yaml is damaged"):
        load_run(run)
    assert time.perf_counter() - start < 2


def test_runs_lists_what_is_there(cells, benchmarked, tmp_path):
    done = rlcb("runs", benchmarked)
    assert done.returncode == 0, done.stderr
    for name in ("cells/ppo_sequential_Catch-v0_seed1", "A2C", "parallel", "Catch-v0", "4 runs: 4 finished."):
        assert name in done.stdout
    data = json.loads(rlcb("runs", benchmarked, "--format", "json").stdout)
    assert len(data["runs"]) == 4
    assert {run["state"] for run in data["runs"]} == {"finished"}
    done = rlcb("runs", tmp_path)
    assert done.returncode == 2
    assert "There is no run in" in done.stderr
    assert rlcb("runs", tmp_path / "none").returncode == 2


def test_names_cannot_drive_a_terminal(tmp_path):
    assert "\x1b" not in str(LeftOut(tmp_path / "\x1b[2Jrun", "why\x07"))


def test_a_lock_that_nobody_holds_is_not_running(cells):
    assert (cells["ppo_sequential"] / ".lock").exists()
    assert not is_running(cells["ppo_sequential"])


def test_runs_are_found_below_a_config_of_somebody_and_below_a_run(trained, tmp_path, call):
    """A config.yaml alone makes no run, not even after a command that was refused; a run hides no other one."""
    shutil.copy(trained / "config.yaml", tmp_path)
    status, _, error = call("train", *TINY, "--output-dir", tmp_path)
    assert (status, "no run has written it" in error) == (2, True), error
    above = copy_run(trained, tmp_path / "above")
    copy_run(trained, above / "below", config={"env.seed": 7})
    copy_run(trained, above / "checkpoints" / "not_looked_at")
    names = ["above", "above/below"]
    listed = json.loads(call("runs", tmp_path, "--format", "json")[1])
    assert [run["run"] for run in listed["runs"]] == names
    assert listed["unreadable"] == []
    assert sorted(run["name"] for run in Directory(tmp_path).snapshot()["runs"]) == names
    (group,) = json.loads(call("compare", tmp_path, "--format", "json")[1])["groups"]
    assert group["seeds"] == [7, 42]
    for path in ("training_summary.json", "benchmark_metrics.json", "logs"):
        target = above / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert is_run(above), "its checkpoints are left"
    (above / ".lock").write_text("")
    shutil.rmtree(above / "checkpoints")
    assert not is_run(above)
