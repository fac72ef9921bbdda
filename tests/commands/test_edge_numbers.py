"""Numbers at the edge: each works, or is refused with one sentence and status 2; never a traceback, never a hang."""

import json

import pytest
from helpers.commands import TINY, rlcb

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.errors import UserError

MAX_INT = 2**63 - 1
VALUES = (
    "0", "1", "-1", "-0", "-0.0", "1e6", "1_000", "'1e5'", "2147483648", "4294967295", "4294967296", str(MAX_INT),
    str(MAX_INT + 1), "1e30", "1e38", "1e39", "1e306", "1e400", "nan", ".nan", ".inf", "-.inf", "1e-300", "true",
    "null", "1" + "0" * 400, "1" + "0" * 5000, "0x" + "f" * 5000, "''", "[]", "{}", "[[[1]]]", "2020-01-01",
)  # fmt: skip


@pytest.mark.parametrize("key", [f"{section}.{key}".strip(".") for section, key, _ in configs.fields()])
def test_a_key_takes_a_value_or_refuses_it_in_one_sentence(key):
    section, _, name = key.rpartition(".")
    for text in VALUES:
        config, refusal = None, ""
        try:
            config = configs.load(None, dict([configs.parse_assignment(f"{key}={text}")]))
        except UserError as error:
            refusal = str(error)
        if config is None:
            assert 0 < len(refusal) < 500, "the value is cut short"
            assert "\n" not in refusal
            continue
        data = configs.to_dict(config)
        value = data[section][name] if section else data[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert abs(value) <= 1e38
            assert text != "true", "is no number"
        assert configs.build(data, {}, source="again") == config


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("training.total_timesteps=9007199254740993", 2**53 + 1),  # a float has no room for it
        ("training.total_timesteps='9007199254740993'", 2**53 + 1),
        ("training.total_timesteps=1_000", 1000),
        ("training.total_timesteps=1e6", 1_000_000),
        ("training.total_timesteps=9223372036854775807", MAX_INT),
        ("env.seed=4294967295", 2**32 - 1),
        ("training.gamma=-0", 0.0),
        ("training.learning_rate=1e30", 1e30),
    ],
)
def test_numbers_are_read_exactly(assignment, value):
    key, given = configs.parse_assignment(assignment)
    section, _, name = key.partition(".")
    assert configs.to_dict(configs.load(None, {key: given}))[section][name] == value


SEQUENTIAL = ("train", *TINY, "--set", "logging.tensorboard=false", "--overwrite")
SMALL = ("env.num_envs=4", "training.n_steps=8", "training.batch_size=16", "training.total_timesteps=100")


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "impala"])
def test_edges_that_work(algorithm, tmp_path, call):
    for settings in (
        ["training.total_timesteps=1"],
        ["training.n_steps=1", "training.batch_size=1"],
        ["env.num_envs=1", "training.batch_size=1"],
        ["training.gamma=0.0", "training.gae_lambda=0", "env.seed=4294967295"],
        ["training.gamma=1.0", "training.gae_lambda=1"],
        [f"training.total_timesteps={MAX_INT}", "training.duration_hours=1e-9"],
        [f"training.log_interval={MAX_INT}", f"training.save_interval={MAX_INT}", "training.duration_hours=1000000"],
        [f"logging.keep_checkpoints={MAX_INT}", "logging.checkpoint_minutes=1e-300", "training.watchdog=1000000"],
        [f"hardware.micro_batch={MAX_INT}", f"training.batch_size={MAX_INT}", "logging.checkpoint_minutes=1e38"],
        ["impala.replay_size=1"],
        ["impala.vtrace_clip_rho_threshold=1e38", "impala.vtrace_clip_c_threshold=1e38", "training.clip_range=1000"],
        ["impala.vtrace_clip_pg_rho_threshold=1e38", "impala.max_grad_norm=1e38", "training.max_grad_norm=1e38"],
        ["env.num_levels=1"],
        ["env.num_levels=0"],
    ):
        sets = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        status, out, err = call(*SEQUENTIAL, "--algorithm", algorithm, *sets, "--output-dir", tmp_path / "run")
        assert (status, err.count("error")) == (0, 0), (settings, out[-500:], err)
        assert json.loads((tmp_path / "run" / "training_summary.json").read_text())["total_timesteps"] >= 1


def test_a_replay_that_there_is_not_is_refused_and_removes_nothing(tmp_path, call):
    run = (*SEQUENTIAL, "--algorithm", "impala", *(word for setting in SMALL for word in ("--set", setting)))
    run = (*run, "--output-dir", tmp_path / "run")
    assert call(*run)[0] == 0
    before = (tmp_path / "run" / "training_summary.json").read_bytes()
    status, _, err = call(*run, "--set", "impala.replay_fraction=0.5", "--overwrite")
    assert (status, "impala.replay_fraction = 0.5 does nothing in sequential mode" in err) == (2, True), err
    assert (tmp_path / "run" / "training_summary.json").read_bytes() == before


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_step_too_large_for_float32_is_refused_one_that_fits_diverges_in_a_sentence(optimizer, tmp_path, call):
    run = (
        *SEQUENTIAL,
        "--algorithm",
        "a2c",
        "--set",
        f"training.optimizer={optimizer}",
        "--output-dir",
        tmp_path / "r",
    )
    status, _, err = call(*run, "--total-timesteps", 4000, "--learning-rate", "1e306")
    assert (status, "training.learning_rate = 1e306 is not allowed; it must be at most 1e+38" in err) == (2, True), err
    status, _, err = call(*run, "--total-timesteps", 4000, "--learning-rate", "1e38")
    assert (status, "became NaN or infinite" in err) == (1, True), err


@pytest.mark.parametrize("sizes", ["model.mlp_sizes=[65536,65536,65536,65536,65536,65536,65536,65536]"])
def test_a_network_larger_than_the_machine_is_refused(sizes, tmp_path, call):
    status, _, err = call(*SEQUENTIAL, "--set", sizes, "--output-dir", tmp_path / "run")
    assert status == 2
    assert "A network of these sizes and its optimiser take" in err


def test_a_log_interval_that_never_comes(tmp_path, call):
    """The last update is in the log all the same; an empty log is no picture."""
    output = tmp_path / "run"
    sets = [word for setting in (*SMALL, f"training.log_interval={MAX_INT}") for word in ("--set", setting)]
    assert call(*SEQUENTIAL, *sets, "--output-dir", output)[0] == 0
    log = output / "logs" / "PPO_Sequential" / "metrics.jsonl"
    assert log.read_text().count("\n") == 1
    status, out, err = call("compare", output)
    assert (status, "Traceback" in err) == (0, False), out + err
    (tmp_path / "empty.jsonl").touch()
    status, _, err = call("plot", "--log-file", tmp_path / "empty.jsonl")
    assert (status, err.count("\n")) == (2, 1), err
    status, out, err = call("train", "--resume", "--output-dir", output)
    assert (status, "Nothing is left to do" in out) == (0, True), err


HUGE = ("nan", "inf", "-inf", "1e400", "-1", "x", "²", "1" + "0" * 5000)


@pytest.mark.parametrize(
    "command",
    [
        ("benchmark", "--plan", "--games", "Catch-v0", "--duration"),
        ("benchmark", "--plan", "--games", "Catch-v0", "--total-timesteps"),
        ("benchmark", "--plan", "--games", "Catch-v0", "--duration", 1, "--seeds"),
        ("benchmark", "--plan", "--games", "Catch-v0", "--duration", 1, "--episodes"),
        ("config", "--total-timesteps"), ("config", "--duration"), ("config", "--num-envs"), ("config", "--seed"),
        ("train", "--node-rank"), ("evaluate", "--num-episodes"), ("evaluate", "--seed"), ("evaluate", "--num-threads"),
        ("scaling", "--seconds"), ("scaling", "--workers"), ("scaling", "--repeats"), ("scaling", "--envs-per-worker"),
        ("scaling", "--project", "--bandwidth"), ("scaling", "--project", "--round-trip"), ("tune", "--budget"),
        ("profile", "--seconds"), ("quickstart", "--duration"), ("dashboard", "--port"),
    ],
    ids=lambda command: " ".join(map(str, command)),
)  # fmt: skip
def test_arguments_are_refused_in_a_sentence(command, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in HUGE:
        status, _, err = call(*command, value)
        assert status == 2, (value[:20], err)
        assert "Traceback" not in err
        assert len(err.splitlines()[-1]) < 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_threshold_is_a_number(command, trained, tmp_path, call):
    for value in ("nan", "inf", "-inf", "1e400", "x"):
        status, _, err = call(command, trained, f"--threshold={value}")
        assert (status, "must be a finite number" in err) == (2, True), err
    status, _, err = call("compare", trained, "--threshold", "1e306", "--format", "json")
    assert status == 0, err


def test_evaluation_of_one_episode(trained, call):
    args = ("--checkpoint", trained / "checkpoints" / "ppo_sequential_final.pt", "--num-threads", 1)
    status, out, err = call("evaluate", *args, "--num-episodes", 1, "--seed", 2**32 - 1)
    assert (status, "Episodes: 1\n" in out) == (0, True), err


@pytest.mark.parametrize("algorithm", ["ppo", "a3c", "impala"])
def test_workers_at_the_edge(algorithm, tmp_path):
    """One step, and timeouts as long as they may be: none overflows a system call."""
    done = rlcb("train", *TINY, "--algorithm", algorithm, "--mode", "parallel", "--num-workers", 2,
                "--set", "parallel.pin=never", "--set", "training.watchdog=1000000", "--set", "cluster.timeout=1000000",
                "--total-timesteps", 1, "--output-dir", tmp_path / "run")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_machines_at_the_edge(tmp_path):
    sets = [f"cluster.{key}=1000000" for key in ("timeout", "join_timeout", "max_restarts")]
    done = rlcb("launch", "local", "--nodes", 1, "--", "train", *TINY, "--workers-per-node", 1, "--total-timesteps", 1,
                *(word for text in sets for word in ("--set", text)), "--output-dir", tmp_path / "run")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
