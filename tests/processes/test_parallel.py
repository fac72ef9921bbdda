"""Parallel mode with real processes: the same maths as one worker, and nothing left behind however it ends."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from helpers import processes
from helpers.commands import ROOT, environment, needs_native, rlcb, started_with
from helpers.forked import Command
from helpers.processes import assert_gone, wait_for_line, without_times, workers_of

from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.run import checkpoint

TINY = ("--env", "Catch-v0", "--set", "training.n_steps=32", "--set", "parallel.pin=never")
PPO_LABEL, A2C_LABEL = "PPO_Parallel", "A2C_Parallel"


def train(output, *args, mode="parallel", algorithm="ppo", workers=2, envs=16, timesteps=3000, batch=128):
    parallel = ("--num-workers", workers, "--num-envs-per-worker", envs // workers) if mode == "parallel" else ()
    return rlcb(
        "train", "--algorithm", algorithm, "--mode", mode, *TINY, *parallel, "--num-envs", envs, "--batch-size", batch,
        "--num-threads", 1, "--total-timesteps", timesteps, "--output-dir", output, *args,
    )  # fmt: skip


@pytest.fixture
def start():
    """Start a run that would go on for ever; whatever the test does, it is gone afterwards."""
    started = []

    def start_run(output, *args):
        call = ["train", "--mode", "parallel", *TINY, "--num-workers", 2, "--num-envs-per-worker", 8]
        call += [
            "--batch-size",
            128,
            "--num-threads",
            1,
            "--total-timesteps",
            100_000_000,
            "--output-dir",
            output,
            *args,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = Command(call, cwd=ROOT, env=environment(), text=True, **pipes)
        started.append(process)
        return process

    yield start_run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def metrics(output, label=PPO_LABEL):
    return [json.loads(line) for line in (output / "logs" / label / "metrics.jsonl").read_text().splitlines()]


def wait_for_updates(output, count, process):
    processes.wait_for_updates(output, PPO_LABEL, count, process, seconds=90)


@pytest.mark.parametrize("algorithm", ["ppo", "a3c", "impala"])
def test_updates_are_dated_by_who_made_them(algorithm, tmp_path):
    """The parent is stopped for a while: it hears of many updates at once, and no speed is made up or lost by that."""
    run, label = tmp_path / "run", f"{algorithm.upper()}_Parallel"
    setting = ("--algorithm", algorithm, "--mode", "parallel", *TINY, "--num-workers", 2, "--num-envs", 16)
    setting += ("--set", "training.save_interval=1000000")  # for a checkpoint, workers do wait until it is taken
    setting += ("--set", "training.log_interval=1")
    with processes.running(*setting, "--duration", 3 / 3600, "--output-dir", run) as process:
        processes.wait_for_updates(run, label, 5, process)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    times = [line["time"] for line in metrics(run, label)]
    assert times == sorted(times)
    assert max(later - time for time, later in itertools.pairwise(times)) < 1.2
    summary = json.loads((run / "training_summary.json").read_text())
    assert sum(summary["phase_shares"].values()) < 1.05


def test_the_server_of_workers_has_a_name_for_a_moment_only(tmp_path, monkeypatch):
    """SIGKILL of everybody while it loads what workers need, which takes seconds, would leave it in /tmp."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    seen = 0.0
    with processes.running("--mode", "parallel", *TINY, "--num-workers", 2, "--output-dir", tmp_path / "run") as run:
        while not workers_of(run):
            seen += 0.01 * any(temporary.iterdir())
            assert run.poll() is None, run.stdout.read()
            time.sleep(0.01)
    assert seen < 0.5


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("a2c", marks=pytest.mark.long)])
def test_many_workers_do_the_same_maths_as_one(algorithm, tmp_path):
    """The same environments, seeds and minibatches: the same parameters after several updates, to rounding."""
    states = {}
    ways = {
        "sequential": {"mode": "sequential"},
        "one": {"workers": 1},
        "four": {"workers": 4},
        "two that share": {"workers": 2, "balance": 0.5},
    }
    for name, kwargs in ways.items():
        balance = kwargs.pop("balance", 0)
        done = train(
            tmp_path / name, "--set", "hardware.precision=float32", "--set", f"parallel.balance={balance}",
            algorithm=algorithm, timesteps=2500, **kwargs,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        mode = "sequential" if name == "sequential" else "parallel"
        states[name] = checkpoint.load(tmp_path / name / "checkpoints" / f"{algorithm}_{mode}_final.pt")
    reference = states.pop("sequential")
    assert reference["progress"]["updates"] >= 5
    for name, state in states.items():
        assert state["progress"]["steps"] == reference["progress"]["steps"], name
        for key, tensor in reference["model"].items():
            torch.testing.assert_close(state["model"][key], tensor, atol=2e-5, rtol=1e-3, msg=f"{name}: {key}")
        scale = state["algorithm"]["reward_normalizer"]
        assert scale == pytest.approx(reference["algorithm"]["reward_normalizer"]), name
        assert state["progress"]["episodes"] == reference["progress"]["episodes"], "those of all, as they ended"


@needs_native
def test_the_network_in_c_has_the_same_gradient_in_any_number_of_workers(tmp_path):
    """Where work is shared, the hidden layer's part of it is made in the reduction; else, in every pass."""
    moments = []
    for workers in (1, 3):
        done = rlcb(
            "train", "--algorithm", "ppo", "--mode", "parallel", "--env", "coinrun", "--num-workers", workers,
            "--num-envs", 6, "--batch-size", 144, "--total-timesteps", 1, "--set", "training.n_steps=24",
            "--set", "training.n_epochs=1", "--set", "training.optimizer=rmsprop", "--set", "hardware.engine=native",
            "--set", "parallel.balance=0.5", "--set", "parallel.pin=never", "--output-dir", tmp_path / str(workers),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        state = checkpoint.load(tmp_path / str(workers) / "checkpoints" / "ppo_parallel_final.pt")
        assert state["progress"]["updates"] == 1
        (squares,) = state["algorithm"]["optimizer"]["moments"].values()  # of the gradient, after one step
        moments.append(squares)
    for name, expected in moments[0].items():
        assert expected.any()
        torch.testing.assert_close(moments[1][name].sqrt(), expected.sqrt(), rtol=1e-2, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "game", ["Catch-v0", pytest.param("coinrun", marks=[needs_native, pytest.mark.long])], ids=["in torch", "in C"]
)
def test_shared_work_gives_the_same_numbers_whoever_does_it(game, start, tmp_path):
    """One of two runs with the same seed has a worker that is stopped again and again."""
    epochs = 20 if game == "Catch-v0" else 1
    flags = ("--env", game, "--set", "parallel.balance=0.5", "--set", f"training.n_epochs={epochs}")
    done = train(tmp_path / "even", *flags, timesteps=1500)
    assert done.returncode == 0, done.stderr
    process = start(tmp_path / "uneven", *flags, "--total-timesteps", 1500)
    wait_for_updates(tmp_path / "uneven", 1, process)
    (slow, _) = workers_of(process)
    while process.poll() is None and slow.is_running():
        for number in (signal.SIGSTOP, signal.SIGCONT):
            with contextlib.suppress(psutil.NoSuchProcess):
                slow.send_signal(number)
            time.sleep(0.03)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 0, text
    assert without_times(metrics(tmp_path / "uneven")) == without_times(metrics(tmp_path / "even"))


def test_same_seed_and_workers_same_metrics(tmp_path):
    first, second = (
        train(tmp_path / name, workers=3, envs=15, batch=96, timesteps=1500) for name in ("first", "second")
    )
    assert first.returncode == second.returncode == 0, first.stderr
    assert without_times(metrics(tmp_path / "first")) == without_times(metrics(tmp_path / "second"))


def test_output_and_summary(tmp_path):
    done = train(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for text in ("Worker 0 started with 8 environments", "Worker 1 started with 8 environments", "Workers: 2",
                 "Total Environments: 16", "PPO Parallel Training"):  # fmt: skip
        assert text in done.stdout, text
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert (summary["mode"], summary["num_workers"], summary["num_envs"]) == ("parallel", 2, 16)
    assert sum(summary["phase_shares"].values()) == pytest.approx(1.0)
    assert summary["phase_shares"]["waiting"] > 0
    assert "Memory per Worker: " in done.stdout
    assert 30 < summary["memory_per_worker_mb"] < 1000 * summary["peak_memory_gb"] / 2, "two workers and the parent"
    lines = metrics(tmp_path / "run")
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))


SHARED = ("--set", "parallel.balance=0.5")  # work, and with it the parameters and the optimiser's moments


@pytest.mark.parametrize("how", [(), SHARED])
def test_resume(tmp_path, how):
    output = tmp_path / "run"
    assert train(output, *how, timesteps=2000).returncode == 0
    first = json.loads((output / "training_summary.json").read_text())
    done = train(output, "--resume", *how, timesteps=4000)
    assert done.returncode == 0, done.stderr
    second = json.loads((output / "training_summary.json").read_text())
    assert second["initial_reward"] == first["initial_reward"]
    assert second["duration_hours"] > first["duration_hours"]
    assert [line["update"] for line in metrics(output)] == list(range(1, second["total_updates"] + 1))


def test_resumed_workers_share_what_the_checkpoint_holds(tmp_path):
    """Each writes its seed's parameters into memory that all see, and then the checkpoint's: with steps too small to
    move them, these are there in the end.
    """
    output = tmp_path / "run"
    assert train(output, *SHARED, timesteps=1000).returncode == 0
    final = output / "checkpoints" / "ppo_parallel_final.pt"
    before = checkpoint.load(final)
    started_with(output, "training.learning_rate", 1e-38)
    assert train(output, "--resume", *SHARED, "--learning-rate", "1e-38", timesteps=2000).returncode == 0
    after = checkpoint.load(final)
    assert after["progress"]["updates"] > before["progress"]["updates"]
    assert after["algorithm"]["optimizer"]["steps"] > before["algorithm"]["optimizer"]["steps"]
    assert all(torch.equal(after["model"][name], tensor) for name, tensor in before["model"].items())
    moments = [state["algorithm"]["optimizer"]["moments"]["exp_avg_sq"] for state in (before, after)]
    assert all(bool((moments[1][name] > 0).any()) for name, tensor in moments[0].items() if bool((tensor > 0).any()))


def test_duration(tmp_path):
    done = train(tmp_path / "run", "--duration", 2 / 3600, timesteps=100_000_000)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert summary["duration_hours"] * 3600 == pytest.approx(2, abs=1)
    assert summary["state"] == "finished"


def test_a_parent_that_was_stopped_hears_of_an_update_before_all_have_started(start, tmp_path):
    output = tmp_path / "run"
    process = start(output)
    wait_for_line("Worker 0 started", process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)  # all workers meet, and train
    process.send_signal(signal.SIGCONT)
    wait_for_updates(output, 4, process)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert "Traceback" not in text


@pytest.mark.parametrize("moment", range(3))
def test_a_killed_worker_ends_the_run(moment, start, tmp_path):
    """SIGKILL at some moment: in a rollout, in an update, at a meeting."""
    output = tmp_path / "run"
    process = start(output, "--set", "training.save_interval=2")
    wait_for_updates(output, 4 + moment, process)
    workers = workers_of(process)
    assert len(workers) == 2
    time.sleep(0.013 * moment)
    workers[1].kill()
    text, _ = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "Worker 1 was killed by SIGKILL" in text
    assert "Traceback" not in text
    assert_gone(workers)
    assert json.loads((output / "training_summary.json").read_text())["state"] == "failed"
    newest = max((output / "checkpoints").glob("*.pt"), key=lambda f: f.stat().st_mtime)
    assert checkpoint.load(newest)["progress"]["updates"] >= 2


def test_workers_do_not_outlive_their_parent(start, tmp_path):
    output = tmp_path / "run"
    process = start(output)
    wait_for_updates(output, 2, process)
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    assert_gone(workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_workers_at_the_same_update(number, start, tmp_path):
    output = tmp_path / "run"
    process = start(output, "--set", "training.n_epochs=60")  # most of the time is in the update
    wait_for_updates(output, 2, process)
    workers = workers_of(process)
    # As a terminal does it: the signal reaches everybody.
    for receiver in (process.pid, *(w.pid for w in workers if number == signal.SIGINT)):
        os.kill(receiver, number)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number, text
    assert "State: interrupted" in text
    assert_gone(workers)
    lines = metrics(output)
    started_with(output, "training.n_epochs", 1)
    done = rlcb("train", "--mode", "parallel", "--resume", "--output-dir", output,
                "--total-timesteps", lines[-1]["step"] + 500)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line["update"] for line in metrics(output)] == list(range(1, len(metrics(output)) + 1))


def test_a_workers_error_is_reported_as_its_own(tmp_path):
    done = train(tmp_path / "run", "--set", "model.architecture=nature")
    assert done.returncode == 2
    assert "nature needs images" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", [(), SHARED])
def test_nan_in_one_worker_stops_all(tmp_path, how):
    output = tmp_path / "run"
    assert train(output, *how, timesteps=1000).returncode == 0
    started_with(output, "training.learning_rate", 1e38)
    done = train(output, "--resume", *how, "--learning-rate", "1e38", timesteps=4000)
    assert done.returncode == 1
    assert "became NaN or infinite" in done.stderr
    assert "Traceback" not in done.stderr


CYCLES = """
import os, psutil, time
from rl_cluster_benchmark.processes.pool import WorkerPool
import work

def state():
    return len(os.listdir('/proc/self/fd')), len(psutil.Process().children())

def shared():
    return set(os.listdir('/dev/shm'))

if __name__ == '__main__':
    for cycle in range(CYCLES + 1):
        memory = work.share()
        with WorkerPool(work.work, 2, (memory,), [None, None]) as pool:
            ranks = sorted(rank for rank, _ in pool.messages(lambda: None))
        assert ranks == [0, 1]
        work.check(memory)
        if cycle == 0:
            before, shared_before = state(), shared()
        if cycle == CYCLES:
            break
    assert state() == before, (before, state())
    end = time.monotonic() + 10
    while shared() - shared_before:  # other tests have something there for a moment
        assert time.monotonic() < end, shared() - shared_before
        time.sleep(0.1)
    print('clean')
"""
WORK = """
def share():
    return None
def work(rank, connection, shared):
    connection.send(rank)
def check(shared):
    pass
"""
SHARING_WORK = """
import torch
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
def share():
    return SharedTensors({'x': ((4,), torch.float32)})
def work(rank, connection, shared):
    shared['x'][rank] = rank + 1
    connection.send(rank)
def check(shared):
    assert shared['x'].tolist() == [1.0, 2.0, 0.0, 0.0]
    shared.close()
"""


@pytest.mark.parametrize(("work", "cycles"), [(WORK, 20), (SHARING_WORK, 5)])
def test_start_and_stop_leave_nothing_behind(work, cycles, tmp_path):
    """Many times in one process: no child, no file descriptor, nothing in /dev/shm."""
    (tmp_path / "work.py").write_text(work)
    (tmp_path / "cycles.py").write_text(CYCLES.replace("CYCLES", str(cycles)))
    env = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, tmp_path / "cycles.py"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "clean", done.stderr


LISTENER = """
import sys, time
import work
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.processes.pool import WorkerPool
if __name__ == '__main__':
    heard = []
    try:
        with WorkerPool(work.work, 2, (sys.argv[1],), (None, None)) as pool:
            for rank, message in pool.messages(lambda: time.sleep(0.05)):
                heard.append(message)
    except TrainingFailedError as error:
        print(error, heard == list(range(200)))
"""
FAILING_WORK = """
import pathlib, time
from rl_cluster_benchmark.core.errors import TrainingFailedError
def work(rank, connection, told):
    if rank == 0:
        for number in range(200):
            connection.send(number)
        pathlib.Path(told).touch()
        time.sleep(60)
    while not pathlib.Path(told).exists():
        time.sleep(0.01)
    raise TrainingFailedError('NaN')
"""


def test_a_failure_does_not_drown_what_was_said_before(tmp_path):
    """The parent is slow, and one worker fails when another has said much: a checkpoint may be in it."""
    (tmp_path / "work.py").write_text(FAILING_WORK)
    (tmp_path / "listener.py").write_text(LISTENER)
    env = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, tmp_path / "listener.py", tmp_path / "told"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "NaN True", done.stderr


UNDYING = """
import time
import work
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.processes import pool as workers
if __name__ == '__main__':
    workers.SECONDS_TO_DIE = 0.2
    try:
        with workers.WorkerPool(work.work, 1, (), (None,)) as pool:
            for rank, message in pool.messages(lambda: None):
                pool.processes[0].kill = lambda: None  # as the kernel, which cannot end what waits for a disk
                print(message, flush=True)
                raise TrainingFailedError('failed')
    except TrainingFailedError as error:
        print(error, flush=True)
"""
UNDYING_WORK = """
import time
def work(rank, connection):
    connection.send('at work')
    time.sleep(600)
"""


def test_a_worker_that_cannot_die_is_not_waited_for(tmp_path):
    """When this process has ended, the kernel ends the worker as soon as it can."""
    (tmp_path / "work.py").write_text(UNDYING_WORK)
    (tmp_path / "pool.py").write_text(UNDYING)
    env = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, tmp_path / "pool.py"], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["at", "work", "failed"], done.stderr
    assert done.returncode == 0, done.stderr


def test_shared_memory_has_no_name():
    before = sorted(os.listdir("/dev/shm"))
    shared = SharedTensors({"a": ((3, 5), torch.float32), "b": ((2,), torch.int64)})
    shared["a"][2, 4], shared["b"][1] = 7.0, 9
    assert sorted(os.listdir("/dev/shm")) == before
    assert float(shared["a"].sum()) == 7.0
    shared.close()


def test_phases_nest():
    clock = PhaseClock()
    with clock.phase("update"):
        time.sleep(0.02)
        with clock.phase("waiting"):
            time.sleep(0.05)
    assert clock.seconds["waiting"] == pytest.approx(0.05, abs=0.02)
    assert clock.seconds["update"] == pytest.approx(0.02, abs=0.015)
