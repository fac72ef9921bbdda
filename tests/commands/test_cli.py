"""Commands as a person types them: help, wrong inputs, the documented scripts."""

import argparse
import os
import pickle
import subprocess
import sys
import time
import tomllib

import pytest
import torch
from helpers.commands import ROOT, environment, rlcb, tiny_run

from rl_cluster_benchmark.cli import parser
from rl_cluster_benchmark.run import checkpoint


def is_one_sentence(done, *texts, status=2):
    """A clear message on stderr, no traceback, the exit status."""
    assert done.returncode == status, done.stdout + done.stderr
    message = done.stderr.strip().splitlines()
    assert len(message) == 1, done.stderr
    for text in texts:
        assert text in message[0]


def test_help_answers_at_once_and_does_not_import_torch():
    best = 10.0
    for _ in range(3):
        start = time.perf_counter()
        done = rlcb("--help")
        best = min(best, time.perf_counter() - start)
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert best < 0.5
    code = "import sys; from rl_cluster_benchmark.cli import main; main.build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_subcommand_calls_a_function_that_is_there():
    tables = tomllib.loads(parser.COMMANDS.read_text())
    commands = [table["run"] for table in tables.values() if "run" in table]
    assert len(commands) > 15
    for command in commands:
        assert callable(parser.command_of(argparse.Namespace(command=command))), command


def test_threads_are_set_before_numpy_and_torch_start():
    code = (
        "import sys\n"
        "from rl_cluster_benchmark.cli import main as cli, training_commands\n"
        "args = cli.build_parser().parse_args(['train', '--num-threads', '3'])\n"
        "config = cli.config_from(args)\n"
        "assert 'numpy' not in sys.modules and 'torch' not in sys.modules\n"
        "training_commands._start_process(config)\n"
        "import os, torch\n"
        "print(torch.get_num_threads(), *(os.environ[v] for v in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS',"
        " 'OPENBLAS_NUM_THREADS')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3"] * 4, done.stderr


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (("--config", "nothing.yaml"), ("Config file nothing.yaml does not exist",)),
        (("--env", "pong"), ("command line: env.name = pong is not a known environment", "coinrun")),
        (("--num-envs", "0"), ("command line: env.num_envs", "at least 1")),
        (("--num-envs", "-3"), ("env.num_envs", "at least 1")),
        (("--num-envs", "many"), ("env.num_envs = 'many'", "whole number")),
        (("--total-timesteps", "0"), ("training.total_timesteps", "at least 1")),
        (("--duration", "0"), ("training.duration_hours", "greater than 0")),
        (("--num-threads", "0"), ("hardware.num_threads", "at least 1")),
        (("--seed", "-1"), ("env.seed", "at least 0")),
        (("--batch-size", "1000"), ("does not divide the rollout", "1024")),
        (("--set", "training.gama=1"), ("training.gama is not a known key; did you mean training.gamma?",)),
        (("--set", "gamma"), ("write it as section.key=value",)),
        (("--set", "training.gamma=["), ("not valid YAML",)),
        (("--set", "training.gamma.x=1"), ("training.gamma",)),
        (("--device", "cuda:99"), ("cuda",)),
        (("--device", "cuda:99999999999999999999"), ("cuda:N",)),
        (("--num-envs", "100000000"), ("env.num_envs", "at most 65536")),
        (("--num-envs", "60000", "--set", "training.n_steps=102400"), ("GiB, this machine has",)),
        (("--num-threads", "100000"), ("hardware.num_threads", "at most")),
        (("--set", "output_dir=2024-13-45"), ("the value is not valid YAML",)),
        (("--algorithm", "dqn"), ("algorithm = 'dqn'",)),
        (
            ("--mode", "distributed", "--algorithm", "a3c", "--set", "cluster.sync=allreduce"),
            ("cluster.sync = allreduce is not for a3c", "async"),
        ),
        (("--algorithm", "impala", "--set", "impala.num_actors=few"), ("impala.num_actors = few", "auto or a whole")),
        (("--algorithm", "impala", "--set", "impala.replay_fraction=1"), ("impala.replay_fraction", "at most 0.95")),
        (
            ("--algorithm", "impala", "--mode", "parallel", "--num-envs", 4, "--set", "impala.num_learners=5"),
            ("5 learners need as many environments",),
        ),
        (("--mode", "distributed", "--node-rank", "4"), ("--node-rank 4 is not one of 4 machines",)),
        (("--mode", "distributed", "--num-nodes", "1", "--set", "cluster.interface=x9"), ("x9 does not exist here",)),
        (("--mode", "distributed", "--master-addr", "no..host"), ("cannot be resolved here",)),
        (("--config", "ppo_parallel", "--num-workers", "5"), ("5 workers: training.batch_size", "2560")),
        (("--config", "ppo_sequential", "--mode", "parallel", "--num-workers", "33"), ("32 environments cannot be",)),
        (("--mode", "parallel", "--device", "cuda"), ("works in sequential mode only",)),
        (("--output-dir", "/proc/nowhere"), ("Cannot write to /proc/nowhere", "--output-dir")),
        (("--set", "model.architecture=nature", "--env", "CartPole-v1"), ("nature needs images",)),
    ],
)
def test_wrong_training_inputs(args, texts, tmp_path):
    output = () if "--output-dir" in args else ("--output-dir", tmp_path / "run")
    is_one_sentence(rlcb("train", *args, *output), *texts)


def test_an_output_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    is_one_sentence(tiny_run(tmp_path / "file" / "run"), "Cannot write to", "Not a directory")


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk(small_disk):
    done = tiny_run(small_disk / "run", "--set", "training.save_interval=1", "--set", "model.mlp_sizes=[128, 128]")
    is_one_sentence(done, "Cannot write", "No space left on device", "Free some space", status=1)
    assert not list((small_disk / "run").rglob("*.tmp"))


def evaluate(path, *args):
    return rlcb("evaluate", "--checkpoint", path, "--num-episodes", 2, *args)


def test_wrong_checkpoints(trained, tmp_path):
    good = trained / "checkpoints" / "ppo_sequential_final.pt"
    content = good.read_bytes()
    is_one_sentence(evaluate(tmp_path / "none.pt"), "does not exist")
    is_one_sentence(evaluate(trained / "checkpoints" / "none.pt"), "does not exist", "ppo_sequential_final.pt")
    for number, bad in enumerate((content[: len(content) // 2], b"", b"hello", content[:3000] + b"x" + content[3001:])):
        file = tmp_path / f"bad{number}.pt"
        file.write_bytes(bad)
        is_one_sentence(evaluate(file), "damaged")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    is_one_sentence(evaluate(tmp_path / "other.pt"), "no checkpoint")
    checkpoint.save(tmp_path / "empty.pt", {"weights": 1})
    is_one_sentence(evaluate(tmp_path / "empty.pt"), "is not a checkpoint of this program")
    is_one_sentence(evaluate(trained), "is a directory; give a checkpoint file")


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


def test_a_checkpoint_cannot_run_code(tmp_path):
    trace = tmp_path / "exploded"
    torch.save({"format_version": 1, "bomb": Bomb(trace)}, tmp_path / "zipped.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(trace)))
    checkpoint.save(tmp_path / "disguised.pt", {"bomb": Bomb(trace)})
    is_one_sentence(evaluate(tmp_path / "zipped.pt"), "no checkpoint")
    is_one_sentence(evaluate(tmp_path / "plain.pt"), "no checkpoint")
    is_one_sentence(evaluate(tmp_path / "disguised.pt"), "could run code")
    assert not trace.exists()


def test_a_checkpoint_of_another_environment_or_network(trained, tmp_path):
    path = trained / "checkpoints" / "ppo_sequential_final.pt"
    is_one_sentence(evaluate(path, "--env", "CartPole-v1"), "expects observations (10, 5) and 3 actions", "Catch-v0")
    is_one_sentence(evaluate(path, "--set", "model.mlp_sizes=[32]"), "weights do not fit this network")
    is_one_sentence(evaluate(path, "--algorithm", "impala"), "was trained with ppo, not impala")
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, copy], check=True)
    done = tiny_run(copy, "--resume", "--env", "CartPole-v1", "--set", "model.mlp_sizes=[32]", timesteps=9000)
    is_one_sentence(done, "env.name = CartPole-v1 (it was Catch-v0), model.mlp_sizes = [32] (it was [64, 64])")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--num-episodes", "0"), "at least 1"),
        (("--seed", "x"), "whole number"),
        (("--levels", "some"), "invalid choice"),
        (("--random", "--deterministic"), "a random policy has no likeliest action"),
        (("--set", "env.seed=7"), "--set env.seed has no effect on an evaluation; --seed says which levels"),
        (("--set", "training.seed=7"), "--set env.seed has no effect on an evaluation; --seed says which levels"),
        (("--set", "env.num_envs=7"), "--set env.num_envs has no effect on an evaluation; episodes are played"),
        (("--set", "algorithm=a2c"), "--set algorithm has no effect on an evaluation; keys of env and hardware have"),
    ],
)
def test_wrong_evaluation_arguments(args, text, trained):
    done = rlcb("evaluate", "--checkpoint", trained / "checkpoints" / "ppo_sequential_final.pt", *args)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_video_and_plot_arguments(trained, tmp_path):
    path = trained / "checkpoints" / "ppo_sequential_final.pt"
    is_one_sentence(evaluate(path, "--video", tmp_path / "a.avi"), "must end in .gif or .mp4")
    is_one_sentence(evaluate(path, "--video", tmp_path / "no" / "a.gif"), "does not exist")
    is_one_sentence(evaluate(path, "--video", tmp_path / "a.gif"), "Only games with images")
    is_one_sentence(rlcb("plot", "--log-file", tmp_path / "none.jsonl"), "cannot be read")
    (tmp_path / "empty.jsonl").write_text("")
    is_one_sentence(rlcb("plot", "--log-file", tmp_path / "empty.jsonl"), "holds no metrics")


def test_render_without_a_display_says_what_to_do(trained):
    env = {key: value for key, value in environment().items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    call = [sys.executable, "-m", "rl_cluster_benchmark", "evaluate", "--render", "--checkpoint"]
    done = subprocess.run(
        [*call, trained / "checkpoints" / "ppo_sequential_final.pt"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    is_one_sentence(done, "--render needs a display", "--video FILE.gif")


@pytest.mark.parametrize("script", sorted({file.name for file in ROOT.glob("*.py")} - {"hatch_build.py"}))
def test_documented_scripts_have_help(script):
    done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: rlcb" in done.stdout


def test_doctor():
    done = subprocess.run(
        [sys.executable, ROOT / "quick_test.py"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("torch", "coinrun", "starpilot", "cores", "precision", "/dev/shm", "open files", "Ready to train"):
        assert text in done.stdout, text
    assert done.stdout.count("made and stepped") == 16


def test_doctor_reports_what_is_missing(tmp_path):
    """Without EnvPool: a PROBLEM with its remedy, and exit status 1."""
    (tmp_path / "envpool.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    env = environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "rl_cluster_benchmark", "doctor"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert "apt-get install libgl1" in done.stdout
    assert "Traceback" not in done.stderr
