"""Environments that raise, hang, give NaN or eat the memory: what the run says, how it ends, what is left."""

import json
import os
import re
import signal
import time

import pytest
from harness import MODES, Faulty

from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.checkpoint import all_finite

LONG = os.environ.get("RLCB_FAULTS") == "long"
SEQUENTIAL, PPO, IMPALA = MODES[0], MODES[1], MODES[4]
HERE = [mode for mode in MODES if mode.mode != "distributed"]


def fault(kind, mode, **more):
    """In one of the processes that step environments."""
    process = "MainProcess" if mode.mode == "sequential" else "rlcb-worker-1"
    return {"RLCB_FAULT": json.dumps({"kind": kind, "process": process, "after": 100, **more})}


def run(mode, output, environ, *more, timesteps=6000, prefix=(), seconds=60):
    with Faulty(mode, output, timesteps, more, environ, prefix) as started:
        status = started.wait(seconds)
        left = started.leftovers()
        assert not left, left
        return status, started.text


def goes_on(mode, output):
    """The short form leaves this to the tests of kills."""
    if LONG:
        status, text = run(mode, output, {}, "--resume-if-present", timesteps=3000)
        assert status == 0, text


def summary(output):
    return json.loads((output / "training_summary.json").read_text())


@pytest.mark.parametrize("mode", HERE if LONG else [PPO], ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", ["nan_reward", pytest.param("inf_observation", marks=pytest.mark.long)])
def test_bad_numbers_stop_the_run(mode, kind, tmp_path):
    status, text = run(mode, tmp_path / "run", fault(kind, mode), "--set", "training.save_interval=1")
    assert status == 1
    assert "NaN or infinite; the last good checkpoint is kept. training.on_nan=skip leaves such" in text
    assert "Traceback" not in text
    assert summary(tmp_path / "run")["state"] == "failed"
    saved = list((tmp_path / "run" / "checkpoints").glob("*.pt"))
    assert saved
    for file in saved:
        assert all_finite(checkpoint.load(file))
    goes_on(mode, tmp_path / "run")


@pytest.mark.parametrize("mode", HERE if LONG else [IMPALA], ids=lambda mode: mode.name)
def test_bad_numbers_are_left_out(mode, tmp_path):
    environ = fault("nan_reward", mode, count=3)
    status, text = run(mode, tmp_path / "run", environ, "--set", "training.on_nan=skip", timesteps=8000)
    assert status == 0, text
    assert "Warning: NaN or infinite numbers after update" in text
    found = summary(tmp_path / "run")
    assert found["bad_numbers"]["bad_rewards"] == 3
    assert found["bad_numbers"]["skipped_updates"] >= 1
    log = next((tmp_path / "run" / "logs").rglob("metrics.jsonl")).read_text()
    assert "NaN" not in log
    assert "Infinity" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert lines[-1]["system/bad_rewards"] == 3
    assert found["total_timesteps"] == lines[-1]["step"] >= 8000
    assert all_finite(checkpoint.load(next((tmp_path / "run" / "checkpoints").glob("*_final.pt"))))


@pytest.mark.long
@pytest.mark.parametrize("mode", [SEQUENTIAL, IMPALA], ids=lambda mode: mode.name)
def test_bad_numbers_without_end_end_the_run(mode, tmp_path):
    environ = {"RLCB_FAULT": json.dumps({"kind": "nan_reward", "after": 10})}
    status, text = run(mode, tmp_path / "run", environ, "--set", "training.on_nan=skip", timesteps=10_000_000)
    assert status == 1
    assert "100 updates in a row met numbers that are NaN or infinite" in text


@pytest.mark.parametrize("mode", [m for m in HERE if m != IMPALA] if LONG else [PPO], ids=lambda mode: mode.name)
def test_a_game_that_hangs_is_shown_with_its_stack(mode, tmp_path):
    more = ("--set", "training.watchdog=2", "--set", "training.save_interval=1")
    status, text = run(mode, tmp_path / "run", fault("hang", mode), *more)
    assert status == 1
    who = "The main process" if mode.mode == "sequential" else "Worker 1"
    assert f"error: {who} made no progress for 2 s (training.watchdog)" in text
    assert re.search(r'sitecustomize\.py", line \d+ in fail', text), "where it hangs"
    goes_on(mode, tmp_path / "run")


@pytest.mark.long
def test_an_actor_that_hangs_is_replaced(tmp_path):
    environ = fault("hang", IMPALA, after=60)
    deadline = time.monotonic() + 60
    with Faulty(IMPALA, tmp_path / "run", 10_000_000, ("--set", "training.watchdog=2"), environ) as started:
        while "Another takes its place" not in started.text:
            started._still_going(deadline)
        assert re.search(r"Actor 0 made no progress for 2 s .training\.watchdog.; it was here", started.text)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait(20) == 143
        assert not started.leftovers()


def test_an_actor_whose_replacement_gets_no_environments_is_replaced_again(tmp_path):
    """What killed the first one, too little memory, may be there for a moment more."""
    shortage = tmp_path / "shortage"
    environ = {"RLCB_FAULT": json.dumps({"kind": "no_environments", "file": str(shortage)})}
    with Faulty(IMPALA, tmp_path / "run", 10_000_000, ("--resume-if-present",), environ) as started:
        started.wait_for_updates(3)
        shortage.touch()
        ((_, actor, *_),) = started.workers()
        actor.kill()
        started.wait_for_text("started again", 60)
        assert not shortage.exists()
        assert started.text.count("Another takes its place") == 2
        assert "The environments could not be started" in started.text
        started.wait_for_updates(3)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait(20) == 143
        assert not started.leftovers()


def test_a_run_that_gets_no_environments_says_so(tmp_path):
    (tmp_path / "shortage").touch()
    environ = {"RLCB_FAULT": json.dumps({"kind": "no_environments", "file": str(tmp_path / "shortage")})}
    status, text = run(IMPALA, tmp_path / "run", environ)
    assert status == 1
    assert "error: The environments could not be started (Resource temporarily unavailable)" in text
    assert "Traceback" not in text


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_a_game_that_raises(mode, tmp_path):
    more = ("--set", "impala.max_actor_restarts=0", "--set", "training.save_interval=1")
    status, text = run(mode, tmp_path / "run", fault("raise", mode), *more)
    assert status == 1
    assert "BrokenGameError: the game fell over" in text, "a bug of somebody's is shown as it is"
    goes_on(mode, tmp_path / "run")


@pytest.mark.long
def test_out_of_memory(tmp_path):
    """Under a limit of the address space: a worker that eats more is told of, and ends the run."""
    limit = ("prlimit", f"--as={6 << 30}")
    status, text = run(PPO, tmp_path / "run", fault("eat", PPO), prefix=limit, timesteps=10_000_000)
    assert status == 1
    assert "MemoryError" in text or "SIGKILL" in text, text
    assert "error: Worker 1" in text
    status, text = run(PPO, tmp_path / "run", {}, "--resume-if-present", timesteps=3000)
    assert status == 0, text


@pytest.mark.long
def test_a_worker_that_the_kernel_ends_for_its_memory(tmp_path):
    """In a cgroup of 1.2 GB: the kernel's SIGKILL."""
    group = "/sys/fs/cgroup/memory/rlcb-test"
    if os.geteuid() != 0 or not os.path.isdir(os.path.dirname(group)):
        pytest.skip("needs root and the memory controller of cgroups version 1")
    os.makedirs(group, exist_ok=True)
    try:
        with open(f"{group}/memory.limit_in_bytes", "w") as file:
            file.write(str(1200 << 20))
        join = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        status, text = run(PPO, tmp_path / "run", fault("eat", PPO), prefix=join, timesteps=10_000_000)
        assert status in (1, -signal.SIGKILL)
        assert status != 1 or "was killed by SIGKILL (is the machine out of memory? use fewer workers)" in text
    finally:
        os.rmdir(group)
