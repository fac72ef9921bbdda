"""A run on disk: its files, its end by signals, its resumption, its repeatability."""

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
import yaml
from helpers import processes
from helpers.commands import ROOT, TINY, environment, read_metrics, rlcb, started_with, tiny_run
from helpers.forked import Command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_cluster_benchmark.config.config_files import load
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.run import Run, _forget_older_updates
from rl_cluster_benchmark.run.summary import final_fps
from rl_cluster_benchmark.tools import quickstart
from rl_cluster_benchmark.tools.analysis.runs import load_runs

SUMMARY_KEYS = {
    "algorithm", "mode", "env", "seed", "num_envs", "num_workers", "duration_hours", "total_timesteps",
    "total_updates", "avg_fps", "final_fps", "peak_memory_gb", "initial_reward", "initial_reward_std",
    "final_reward", "final_reward_std", "best_reward", "num_episodes", "phase_shares", "cpu_utilization",
    "git_commit", "versions", "cpu_model",
}  # fmt: skip
TIMES = ("time", "charts/SPS", "time/", "system/")


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def start(output, *args, timesteps=10_000_000):
    call = ["train", *TINY, "--total-timesteps", timesteps, "--output-dir", output, *args]
    return Command(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_updates(output, count, process):
    processes.wait_for_updates(output, "PPO_Sequential", count, process, seconds=60)


def updates(output):
    return [line["update"] for line in read_metrics(output)]


def test_files_of_a_finished_run(trained):
    summary = json.loads((trained / "training_summary.json").read_text())
    assert set(summary) >= SUMMARY_KEYS
    assert summary == json.loads((trained / "benchmark_metrics.json").read_text())
    assert (summary["algorithm"], summary["mode"], summary["state"]) == ("PPO", "sequential", "finished")
    assert 4000 <= summary["total_timesteps"] < 4000 + 16 * 32
    assert sum(summary["phase_shares"].values()) == pytest.approx(1.0)
    assert set(summary["phase_shares"]) == {"env", "inference", "update", "communication", "waiting", "other"}

    lines = read_metrics(trained)
    assert [line["update"] for line in lines] == list(range(1, summary["total_updates"] + 1))
    assert lines[-1]["step"] == summary["total_timesteps"]
    columns = json.loads((trained / "metrics.json").read_text())
    assert columns["step"] == [line["step"] for line in lines]
    assert columns["losses/entropy"] == [line["losses/entropy"] for line in lines]

    kept = sorted(file.name for file in (trained / "checkpoints").iterdir())
    assert len([name for name in kept if name.startswith("ppo_sequential_step_")]) == 3
    assert "ppo_sequential_final.pt" in kept
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert (config["env"]["name"], config["training"]["gamma"]) == ("Catch-v0", 0.99)


def test_no_checkpoint_is_newer_than_the_log_on_the_disk(tmp_path, monkeypatch, call):
    """When the power fails, what has not been flushed to the disk is gone: the log goes there first."""
    flushed = []

    def fsync(file):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        really(file)

    really = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    args = ("--set", "training.save_interval=2", "--total-timesteps", 4000, "--output-dir", tmp_path)
    status, _, err = call("train", *TINY, *args)
    assert status == 0, err
    whats = [name for name in flushed if name == "metrics.jsonl" or ".pt" in name]
    assert sum(".pt" in name for name in whats) >= 4
    assert all(before == "metrics.jsonl" for before, name in itertools.pairwise(whats) if ".pt" in name)
    assert whats[0] == "metrics.jsonl"


def test_tensorboard_has_the_same_scalars_over_steps(trained):
    events = EventAccumulator(str(trained / "logs" / "PPO_Sequential"))
    events.Reload()
    names = {
        "charts/episodic_return", "charts/episodic_length", "charts/SPS", "losses/policy_loss", "losses/value_loss",
        "losses/entropy", "losses/approx_kl", "losses/clipfrac", "losses/explained_variance", "time/update",
        "system/memory_gb",
    }  # fmt: skip
    assert names <= set(events.Tags()["scalars"])
    points = [(event.step, event.value) for event in events.Scalars("losses/entropy")]
    expected = [(line["step"], line["losses/entropy"]) for line in read_metrics(trained)]
    assert points == [(step, pytest.approx(value)) for step, value in expected]


def test_a_saved_config_repeats_the_run(trained, tmp_path):
    again = tmp_path / "again"
    done = rlcb("train", "--config", trained / "config.yaml", "--output-dir", again)
    assert done.returncode == 0, done.stderr
    assert without_times(read_metrics(again)) == without_times(read_metrics(trained))


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_one_seed_one_result_on_procgen(precision, tmp_path):
    runs = {}
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        done = rlcb(
            "train", "--env", "starpilot", "--num-envs", 4, "--batch-size", 32, "--total-timesteps", 128,
            "--set", "training.n_steps=16", "--set", "model.channels=[4, 8]", "--num-threads", 2, "--seed", seed,
            "--set", f"hardware.precision={precision}", "--output-dir", tmp_path / name,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs[name] = without_times(read_metrics(tmp_path / name))
    assert runs["first"] == runs["second"]
    assert runs["first"] != runs["other"]


def test_the_output_of_a_run(tmp_path):
    done = tiny_run(tmp_path / "run")
    for text in (
        "PPO Sequential Training",
        "CPU: ",
        "Threads: 1",
        "Precision: float32",
        "TRAINING SUMMARY",
        "Average FPS",
    ):
        assert text in done.stdout, text
    assert "Step: " in done.stdout, "plain lines when the output is not a terminal"
    assert done.stderr == ""


def test_reports_out_of_order_are_not_taken_for_speed():
    """A hundred steps every tenth of a second; ten reports are dated alike, because the first of them came last."""
    run = object.__new__(Run)
    run.steps, run._logs = 0, deque([(0.0, 0)])
    rates = []
    for update in range(1, 101):
        run.steps += 100
        rates.append(run._rate(0.1 * update if not 40 <= update < 50 else 4.9))
    assert max(rates) < 1100, rates
    assert rates[-1] == pytest.approx(1000)
    run.steps += 100
    assert run._rate(110.0) == pytest.approx(1.0), "a slow update counts by itself"


def test_the_final_speed_is_that_of_a_second_at_least():
    """Reports of other machines come in lumps: many updates share a moment, the last ten may span almost no time."""
    run = object.__new__(Run)
    run.recent = deque([(0.0, 0)])
    for update in range(1, 401):  # 100 steps every 10 ms, told in lumps of 20 updates
        moment = 0.2 * (1 + (update - 1) // 20)
        run.recent.append((moment, 100 * update))
        _forget_older_updates(run.recent)
    assert final_fps(run) == pytest.approx(10_000, rel=0.2)
    slow = deque((10.0 * update, update) for update in range(30))
    _forget_older_updates(slow)
    assert len(slow) == 11, "of slow updates the last ten"


def test_duration_ends_a_run(tmp_path):
    started = time.monotonic()
    done = tiny_run(tmp_path / "run", "--duration", 3 / 3600, timesteps=100_000_000)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert summary["duration_hours"] * 3600 == pytest.approx(3, abs=0.5)
    assert time.monotonic() - started < 30


def test_a_directory_with_a_run_is_not_overwritten(trained, tmp_path):
    before = sorted((file.name, file.stat().st_mtime_ns) for file in trained.rglob("*.pt"))
    done = tiny_run(trained)
    assert done.returncode == 2
    assert "already holds a run. Add --resume" in done.stderr
    assert sorted((file.name, file.stat().st_mtime_ns) for file in trained.rglob("*.pt")) == before
    assert tiny_run(tmp_path / "run", timesteps=1000).returncode == 0
    done = tiny_run(tmp_path / "run", "--overwrite", "--seed", 9, timesteps=600)
    assert done.returncode == 0
    assert updates(tmp_path / "run") == [1, 2]


def test_without_output_dir_the_documented_places_are_used(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "train_ppo_sequential.py", *map(str, TINY), "--total-timesteps", "600"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints" / "ppo_sequential" / "ppo_sequential_final.pt").is_file()
    assert (tmp_path / "logs" / "PPO_Sequential" / "metrics.jsonl").is_file()
    assert (tmp_path / "logs" / "PPO_Sequential" / "training_summary.json").is_file()


def test_resume_goes_on_where_the_run_ended(tmp_path):
    output = tmp_path / "run"
    assert tiny_run(output, timesteps=2000).returncode == 0
    first = json.loads((output / "training_summary.json").read_text())
    early = read_metrics(output)
    done = tiny_run(output, "--resume", timesteps=5000)
    assert done.returncode == 0, done.stderr
    assert f"Resumed from {output}/checkpoints/ppo_sequential_final.pt" in done.stdout
    second = json.loads((output / "training_summary.json").read_text())
    lines = read_metrics(output)
    assert lines[: len(early)] == early
    assert updates(output) == list(range(1, second["total_updates"] + 1))
    assert all(a["step"] < b["step"] and a["time"] < b["time"] for a, b in itertools.pairwise(lines))
    assert second["num_episodes"] > first["num_episodes"]
    assert second["initial_reward"] == first["initial_reward"]
    assert second["duration_hours"] > first["duration_hours"]


def test_the_last_update_is_in_the_log_whatever_the_interval(tmp_path):
    """A line after every fourth update and one of the last, once, also when the run is resumed there."""
    output, ends = tmp_path / "run", []
    for timesteps, more in ((4000, ()), (5000, ("--resume",))):
        done = tiny_run(output, "--set", "training.log_interval=4", *more, timesteps=timesteps)
        assert done.returncode == 0, done.stderr
        lines, summary = read_metrics(output), json.loads((output / "training_summary.json").read_text())
        ends.append(summary["total_updates"])
        expected = sorted({*range(4, ends[-1] + 1, 4), *ends})
        assert [line["update"] for line in lines] == expected
        assert lines[-1]["step"] == summary["total_timesteps"]
        assert lines[-1]["charts/episodic_return"] == summary["final_reward"]
        assert json.loads((output / "metrics.json").read_text())["update"] == expected
    assert ends[0] % 4 > 0, "its last update is none of those that are logged anyway"
    done = tiny_run(tmp_path / "short", "--set", "training.log_interval=1000", timesteps=1000)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "short")) == 1
    assert load_runs([tmp_path / "short"])[1] == [], "it can be compared"


def test_the_log_has_a_line_of_every_update_with_a_checkpoint(tmp_path, call):
    """A run may end there, and one that goes on from there with nothing left to do has no other line to write."""
    every = ("--set", "training.log_interval=7", "--set", "training.save_interval=5")
    assert call("train", *TINY, *every, "--total-timesteps", 12 * 512, "--output-dir", tmp_path)[0] == 0
    updates = [line["update"] for line in read_metrics(tmp_path)]
    assert updates == sorted({*range(5, updates[-1] + 1, 5), *range(7, updates[-1] + 1, 7), updates[-1]})
    assert len(updates) >= 4


def test_resume_loads_weights_optimiser_and_counters(tmp_path):
    output = tmp_path / "run"
    tiny_run(output, timesteps=2000)
    before = checkpoint.load(output / "checkpoints" / "ppo_sequential_final.pt")
    done = tiny_run(output, "--resume", timesteps=2000)  # nothing left to do
    assert done.returncode == 0
    after = checkpoint.load(output / "checkpoints" / "ppo_sequential_final.pt")
    assert all((before["model"][name] == after["model"][name]).all() for name in before["model"])
    assert after["algorithm"]["optimizer"]["steps"] == before["algorithm"]["optimizer"]["steps"] > 0
    assert after["algorithm"]["reward_normalizer"] == before["algorithm"]["reward_normalizer"]
    assert after["progress"]["random_state"] == before["progress"]["random_state"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_in_good_order(number, tmp_path):
    output = tmp_path / "run"
    process = start(output)
    wait_for_updates(output, 5, process)
    for repeated in (number, signal.SIGHUP, number):  # at the same time: one order
        process.send_signal(repeated)
        time.sleep(0.02)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "finishing and saving" in text
    assert f"State: interrupted (signal {int(number)})" in text
    summary = json.loads((output / "training_summary.json").read_text())
    assert summary["state"] == "interrupted"
    done = tiny_run(output, "--resume", timesteps=summary["total_timesteps"] + 2000)
    assert done.returncode == 0, done.stderr
    count = json.loads((output / "training_summary.json").read_text())["total_updates"]
    assert count > summary["total_updates"]
    assert updates(output) == list(range(1, count + 1)), "no line lost, none twice"


def test_killed_anywhere_nothing_is_lost_but_the_last_updates(tmp_path):
    output = tmp_path / "run"
    generator = random.Random(0)
    saved = 0
    for attempt in range(4):
        process = start(output, "--resume-if-present", "--set", "training.save_interval=3")
        wait_for_updates(output, saved + 4, process)
        time.sleep(generator.random() * 0.3)
        process.kill()
        process.communicate()
        half = f".ppo_sequential_step_1.pt.{socket.gethostname()}-{process.pid}.tmp"
        (output / "checkpoints" / half).write_bytes(b"half a checkpo")
        # The crash may also have cut a line short.
        if attempt == 2:
            with open(output / "logs" / "PPO_Sequential" / "metrics.jsonl", "a") as log:
                log.write('{"step": 12')
        newest = max((output / "checkpoints").glob("ppo_*.pt"), key=lambda f: int(f.stem.split("_")[-1]))
        saved = checkpoint.load(newest)["progress"]["updates"]
    steps = checkpoint.load(newest)["progress"]["steps"]
    done = tiny_run(output, "--resume", timesteps=steps + 2000)
    assert done.returncode == 0, done.stderr
    assert updates(output) == list(range(1, len(updates(output)) + 1))
    assert not list((output / "checkpoints").glob("*.tmp"))
    events = EventAccumulator(str(output / "logs" / "PPO_Sequential"), size_guidance={"scalars": 0})
    events.Reload()
    points = [event.step for event in events.Scalars("losses/entropy")]
    assert points == [line["step"] for line in read_metrics(output)], "TensorBoard shows each point once, too"


def test_a_damaged_checkpoint_is_passed_over(trained, tmp_path):
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, output], check=True)
    (output / "checkpoints" / "ppo_sequential_final.pt").unlink()
    newest, before, _ = sorted(
        (output / "checkpoints").glob("*_step_*.pt"), key=lambda f: int(f.stem.split("_")[-1]), reverse=True
    )
    newest.write_bytes(newest.read_bytes()[:5000])
    done = tiny_run(output, "--resume", timesteps=6000)
    assert done.returncode == 0, done.stderr
    assert f"Checkpoint {newest} is damaged or cut short" in done.stdout
    assert f"Resumed from {before}" in done.stdout
    assert newest.with_suffix(".pt.damaged").exists()


def test_when_every_checkpoint_is_damaged_nothing_is_thrown_away(trained, tmp_path):
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, output], check=True)
    for file in (output / "checkpoints").glob("*.pt"):
        file.write_bytes(b"gone")
    before = read_metrics(output)
    done = tiny_run(output, "--resume", timesteps=6000)
    assert done.returncode == 2
    assert "can be read any more; --overwrite starts the run anew" in done.stderr
    assert read_metrics(output) == before


def test_a_mistake_leaves_the_run_as_it_was(trained, tmp_path):
    """A refused --resume or --overwrite changes nothing; a refused new run leaves the directory free."""
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, output], check=True)

    def contents():  # the lock names its last holder
        return {file: file.read_bytes() for file in output.rglob("*") if file.is_file() and file.name != ".lock"}

    files = contents()
    for way in (("--resume", "--set", "model.mlp_sizes=[32]"), ("--overwrite", "--set", "model.architecture=impala")):
        assert tiny_run(output, *way, timesteps=6000).returncode == 2
        assert contents() == files
    assert tiny_run(tmp_path / "new", "--set", "model.architecture=impala").returncode == 2
    assert tiny_run(tmp_path / "new", timesteps=600).returncode == 0


def test_the_reader_of_the_output_may_go_away(tmp_path):
    """Ctrl-C on `rlcb train | tee log` ends tee first; the run must still save."""
    output = tmp_path / "run"
    process = start(output)
    wait_for_updates(output, 3, process)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert json.loads((output / "training_summary.json").read_text())["state"] == "interrupted"
    assert list((output / "checkpoints").glob("*.pt"))


def test_diverged_weights_are_not_saved(tmp_path):
    output = tmp_path / "run"
    done = tiny_run(output, "--batch-size", 512, "--set", "training.n_epochs=1", "--learning-rate", "1e38",
                    "--set", "training.save_interval=1")  # fmt: skip
    assert done.returncode == 1
    assert "weights became NaN or infinite" in done.stderr
    assert not list((output / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("args", [("--num-envs", 1, "--batch-size", 1), ("--num-envs", 2, "--batch-size", 1)])
def test_the_smallest_sizes_work(args, tmp_path):
    tiny = ("--set", "training.n_steps=1", "--total-timesteps", 60, "--num-threads", 1)
    done = rlcb("train", "--env", "Catch-v0", *args, *tiny, "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr


def test_tensorboard_after_a_restart_from_the_beginning(tmp_path):
    output = tmp_path / "run"
    process = start(output)
    wait_for_updates(output, 3, process)
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert not list((output / "checkpoints").glob("*.pt"))
    done = tiny_run(output, "--resume", timesteps=2000)
    assert "starting at the beginning" in done.stdout
    events = EventAccumulator(str(output / "logs" / "PPO_Sequential"), size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("losses/entropy")]
    assert steps == [line["step"] for line in read_metrics(output)]


def test_two_runs_cannot_share_a_directory(tmp_path):
    output = tmp_path / "run"
    process = start(output)
    try:
        wait_for_updates(output, 1, process)
        done = tiny_run(output, "--resume")
        assert done.returncode == 2
        assert "is in use by another run" in done.stderr
    finally:
        process.kill()
        process.communicate()


def test_nan_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    output = tmp_path / "run"
    assert tiny_run(output, timesteps=1000).returncode == 0
    started_with(output, "training.learning_rate", 1e38)
    final = (output / "checkpoints" / "ppo_sequential_final.pt").read_bytes()
    done = tiny_run(output, "--resume", timesteps=4000)
    assert done.returncode == 1
    assert "became NaN or infinite" in done.stderr
    assert "Traceback" not in done.stderr
    assert (output / "checkpoints" / "ppo_sequential_final.pt").read_bytes() == final
    assert json.loads((output / "training_summary.json").read_text())["state"] == "failed"


def test_threads_stay_within_what_was_asked(tmp_path):
    """CPU time over wall time is the number of busy threads."""
    code = (
        "import resource, sys, time\n"
        "from rl_cluster_benchmark.cli.main import main\n"
        "start = time.perf_counter()\n"
        "main(sys.argv[1:])\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('BUSY', (usage.ru_utime + usage.ru_stime) / (time.perf_counter() - start))\n"
    )
    output = tmp_path / "run"
    train = ("train", "--env", "coinrun", "--num-envs", 8, "--batch-size", 128, "--total-timesteps", 1000)
    train += ("--set", "training.n_steps=128")
    evaluate = ("evaluate", "--checkpoint", output / "checkpoints" / "ppo_sequential_final.pt", "--num-episodes", 4)
    for call in ((*train, "--output-dir", output), evaluate):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, call), "--num-threads", "1"],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.rpartition("BUSY")[2]) < 1.2, call[0]


def test_the_quickstart(tmp_path, call, monkeypatch):
    monkeypatch.setattr(quickstart, "EPISODES", 4)
    run = tmp_path / "run"
    status, out, err = call("quickstart", "--duration", 6 / 3600, "--output-dir", run)
    assert status == 0, out + err
    for words in ("Workers: ", "trained agent", "random policy", "Learning curve:"):
        assert words in out
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert next(run.glob("checkpoints/*_final.pt"))
    again = load("quickstart", {"output_dir": str(run), "training.duration_hours": 6 / 3600})
    assert quickstart._holds_a_quickstart(RunDirectory.of(again), again)  # and so it is replaced unasked
