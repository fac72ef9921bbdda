"""--resume: only a run that is there, only as it was started, and only if something is left to do."""

import json
import shutil

import pytest
from helpers.commands import TINY, rlcb, tiny_run

from rl_cluster_benchmark.cli.arguments import config_from
from rl_cluster_benchmark.cli.main import build_parser, parse_train
from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import MAY_CHANGE
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.env.environments import level_range
from rl_cluster_benchmark.run import checkpoint, resumption
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.launch.command import TrainCommand
from rl_cluster_benchmark.training import training

SEQUENTIAL = ("--algorithm", "ppo", "--mode", "sequential")


def contents(folder):
    """Every file, its bytes and when it was last written, locks included."""
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def record(folder):
    """What a run leaves behind: all but the lock, which names its last holder."""
    return {file: data for file, (data, _) in contents(folder).items() if file.name != ".lock"}


def refused(done, *texts):
    status, _, err = done
    assert status == 2, done
    assert err.startswith("error: ")
    assert err.count("\n") == 1, "one sentence"
    for text in texts:
        assert text in err
    return err


def copy_of(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run", copy_function=shutil.copy2)


@pytest.mark.parametrize(
    ("args", "texts"),
    [
        (("--algorithm", "a2c"), ["algorithm = a2c (it was ppo)"]),
        (("--algorithm", "impala", "--total-timesteps", 9000), ["algorithm = impala (it was ppo)"]),
        (("--config", "a2c_sequential"), ["algorithm = a2c (it was ppo)", "= procgen-coinrun-v0 (it was Catch-v0)"]),
        (("--env", "CartPole-v1"), ["env.name = CartPole-v1 (it was Catch-v0)"]),
        (("--learning-rate", "0.1", "--seed", 7), ["learning_rate = 0.1 (it was 0.001)", "env.seed = 7 (it was 42)"]),
        (("--set", "training.target_kl=0.02"), ["training.target_kl = 0.02 (it was null)"]),
        (("--num-envs", 32, "--set", "model.mlp_sizes=[32]"), ["num_envs = 32", "mlp_sizes = [32] (it was [64"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["--resume", "--resume-if-present"])
def test_a_run_is_resumed_as_it_was_started(args, texts, how, trained, tmp_path, call):
    """Bugs 5, 11: nothing of the run is touched, and every changed key is named."""
    output = copy_of(trained, tmp_path)
    before = contents(output)
    err = refused(call("train", how, "--output-dir", output, *args), *texts, "Leave that out")
    assert err.count(" (it was ") == len(texts) or "--config" in args
    assert contents(output) == before


def test_another_mode_is_refused_too(trained, tmp_path):
    """Bug 5."""
    output = copy_of(trained, tmp_path)
    before = contents(output)
    one_machine = ("--num-nodes", 1, "--workers-per-node", 1, "--master-port", free_port())
    for args in (("--mode", "parallel"), ("--mode", "distributed", *one_machine)):
        done = tiny_run(output, "--resume", *args)
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"mode = {args[1]} (it was sequential)" in done.stderr
        assert contents(output) == before


def test_the_levels_of_training_stay_what_they_were(tmp_path):
    """Bug 11: a resumed run with fewer levels would be tested on levels that it was trained on."""
    output = tmp_path / "run"
    train = ("train", "--env", "starpilot", "--num-envs", 4, "--batch-size", 32, "--num-threads", 1, "--output-dir",
             output, "--set", "training.n_steps=8")  # fmt: skip
    done = rlcb(*train, "--set", "env.num_levels=500", "--total-timesteps", 32)
    assert done.returncode == 0, done.stderr
    done = rlcb(*train, "--set", "env.num_levels=50", "--total-timesteps", 64, "--resume")
    assert done.returncode == 2
    assert "env.num_levels = 50 (it was 500)" in done.stderr
    final = output / "checkpoints" / "ppo_sequential_final.pt"
    done = rlcb("evaluate", "--checkpoint", final, "--levels", "test", "--num-episodes", 1, "--num-threads", 1)
    assert "Levels: levels never trained on" in done.stdout, done.stderr
    state = checkpoint.load(final)
    env = configs.build(state["config"], {}, source="").env
    assert (state["progress"]["steps"], level_range(env, "train"), level_range(env, "test")[0]) == (32, (0, 500), 500)


def test_there_must_be_a_run_to_resume(trained, tmp_path, call, monkeypatch):
    """Bug 5: an empty, missing or mistyped directory is no wish for 25 million steps; nothing is created."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "matrix").mkdir()
    (tmp_path / "matrix" / "benchmark.yaml").write_text("")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "scaling.json").write_text("{}")
    run = copy_of(trained, tmp_path)
    monkeypatch.chdir(tmp_path)
    before, folders = contents(tmp_path), sorted(tmp_path.rglob("*"))
    for place, why in (
        (("--output-dir", "rum"), "There is no run in rum to resume: it does not exist. Check the directory"),
        (("--output-dir", "deep/er"), "There is no run in deep/er to resume"),
        (("--output-dir", "empty"), "There is no run in empty to resume: it holds none. Check the directory"),
        (("--output-dir", "file"), "There is no run in file to resume: it is a file"),
        (("--output-dir", "file/run"), "There is no run in file/run to resume"),
        (("--output-dir", "matrix"), "it holds a benchmark, which `rlcb benchmark --resume` goes on with"),
        (("--output-dir", "sweep"), "it holds the results of `rlcb scaling`"),
        (("--output-dir", tmp_path), f"it holds none; there are runs in {run}."),
        (("--output-dir", run / "logs"), f"There is no run in {run / 'logs'} to resume"),
        (("--log-dir", run / "logs"), "it holds metrics, but neither config.yaml nor a checkpoint"),
        (("--log-dir", "elsewhere", "--checkpoint-dir", "there"), "no run in elsewhere/PPO_Sequential to resume"),
        ((), "There is no run in logs/PPO_Sequential to resume"),
    ):
        refused(call("train", "--resume", *SEQUENTIAL, *place), why)
    refused(call("train", "--resume-if-present", "--log-dir", run / "logs"), "it holds metrics")
    assert (contents(tmp_path), sorted(tmp_path.rglob("*"))) == (before, folders)
    for mode in (("parallel",), ("distributed", "--num-nodes", 1, "--master-port", free_port())):
        done = rlcb("train", "--resume", "--mode", *mode, "--env", "Catch-v0", "--output-dir", tmp_path / "rum")
        assert (done.returncode, "There is no run in" in done.stderr) == (2, True), done.stderr
        assert not (tmp_path / "rum").exists()
    for pair in (("--resume", "--resume-if-present"), ("--overwrite", "--resume-if-present")):
        assert "not allowed with" in call("train", *pair)[2]


def test_checkpoints_that_are_elsewhere_are_no_reason_to_begin_again(tmp_path, call, monkeypatch):
    """Bug 5, without --output-dir: another --checkpoint-dir, or the logs' directory for the run's."""
    monkeypatch.chdir(tmp_path)
    logs = ("--log-dir", "logs", "--checkpoint-dir", "saved")
    assert call("train", *TINY, *logs, "--total-timesteps", 600)[0] == 0
    before = contents(tmp_path)
    for place in (("--log-dir", "logs"), ("--output-dir", "logs/PPO_Sequential")):
        refused(
            call("train", "--resume", *place, "--set", "logging.checkpoint_dir=null", "--total-timesteps", 1200),
            "The run in logs/PPO_Sequential has saved checkpoints, but there is none in",
        )
    assert contents(tmp_path) == before
    refused(call("train", "--resume", "--algorithm", "a2c", *logs), "there are runs in logs/PPO_Sequential")
    status, out, err = call("train", "--resume", *logs, "--total-timesteps", 1200)
    assert status == 0, err
    assert "Resumed from saved/ppo_sequential_final.pt" in out


def test_resume_if_present(tmp_path, call):
    """Bug 5: for scripts, which do not know whether it is the first time."""
    output = tmp_path / "run"
    for timesteps, text in ((600, "No checkpoint to resume from: starting at the beginning."), (1200, "Resumed from")):
        args = ("--resume-if-present", "--output-dir", output, "--total-timesteps", timesteps)
        status, out, err = call("train", *TINY, *args)
        assert (status, text in out) == (0, True), out + err
    # A run that was killed before its first checkpoint is a run, and has its own settings.
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.yaml").write_text((output / "config.yaml").read_text().replace("gamma: 0.99", "gamma: 0.5"))
    (young / ".lock").write_text((output / ".lock").read_text())
    refused(call("train", "--resume", "--output-dir", young, "--set", "training.gamma=0.7"), "(it was 0.5)")
    status, out, _ = call("train", "--resume", "--output-dir", young, "--total-timesteps", 600)
    assert (status, "starting at the beginning" in out) == (0, True)
    assert "gamma: 0.5" in (young / "config.yaml").read_text()


def test_a_launchers_later_attempt_starts_what_the_first_could_not(tmp_path):
    """Bug 5: an attempt that died before there was a run leaves nothing to resume."""
    train = ["train", *map(str, TINY), "--workers-per-node", "1", "--total-timesteps", "600"]
    command = TrainCommand.parse(
        [*train, "--output-dir", str(tmp_path / "run"), "--overwrite"], parse_train, num_nodes=1
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("")
    for attempt, text in ((1, "TRAINING SUMMARY"), (2, "Nothing is left to do")):
        call = command.for_node(0, num_nodes=1, address="localhost", port=free_port())
        done = rlcb(*call[call.index("train") :], variables=command.variables(attempt))
        assert (done.returncode, text in done.stdout) == (0, True), done.stdout + done.stderr


# What has finished


def is_left_alone(output, *how, timesteps=()):
    before = record(output)
    for more in ((), *timesteps):
        done = rlcb(*how, "--resume", "--output-dir", output, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Nothing is left to do: raise --total-timesteps or --duration" in done.stdout
        assert record(output) == before
    assert json.loads((output / "training_summary.json").read_text())["final_fps"] > 0


def test_a_finished_run_is_left_as_it_is(trained, tmp_path):
    """Bug 16: its speed, its date and its versions are those of the training."""
    output = copy_of(trained, tmp_path)
    is_left_alone(output, "train", *SEQUENTIAL, timesteps=[("--total-timesteps", 1000)])
    done = tiny_run(output, "--resume", timesteps=6000)
    assert "Resumed from" in done.stdout, "and can go on"


@pytest.mark.parametrize("cell", ["ppo_parallel", "a2c_parallel"])
def test_a_finished_parallel_run_is_left_as_it_is(cell, cells, tmp_path):
    """Bug 16."""
    is_left_alone(copy_of(cells[cell], tmp_path), "train", "--algorithm", cell[:3], "--mode", "parallel")


@pytest.mark.parametrize("algorithm", ["a3c", "impala"])
def test_a_run_of_actors_that_has_finished_by_its_duration_is_left_as_it_is(algorithm, tmp_path):
    """Bug 16."""
    mode = ("train", *TINY, "--algorithm", algorithm, "--mode", "parallel", "--num-workers", 2, "--duration", 1 / 3600)
    done = rlcb(*mode, "--set", "parallel.pin=never", "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    is_left_alone(tmp_path / "run", "train", timesteps=[("--duration", 0.5 / 3600)])


def test_a_finished_run_of_machines_is_left_as_it_is(tmp_path):
    """Bug 16: both machines end in good order, with nothing to do."""
    launch = ("launch", "local", "--nodes", 2, "--", "train", *TINY, "--workers-per-node", 1, "--total-timesteps", 600)
    done = rlcb(*launch, "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    is_left_alone(tmp_path / "run", *launch)


def test_a_run_killed_before_its_summary_gets_one(trained, tmp_path):
    """Complete, but without its last files: that is left to do, and the speed is that of its log."""
    output = copy_of(trained, tmp_path)
    summary = json.loads((output / "training_summary.json").read_text())
    (output / "training_summary.json").unlink()
    (output / "benchmark_metrics.json").unlink()
    done = tiny_run(output, "--resume", timesteps=summary["total_timesteps"])
    assert done.returncode == 0, done.stderr
    after = json.loads((output / "training_summary.json").read_text())
    assert (after["state"], after["total_updates"]) == ("finished", summary["total_updates"])
    assert after["final_fps"] == pytest.approx(summary["final_fps"], rel=0.5)


def test_a_final_checkpoint_that_is_there_is_not_written_again(trained, tmp_path, call):
    """Killed between its last checkpoint and its summary: evaluations may have named that checkpoint meanwhile."""
    output = copy_of(trained, tmp_path)
    final = output / "checkpoints" / "ppo_sequential_final.pt"
    before, digest = final.read_bytes(), checkpoint.digest_of(final)
    (output / "training_summary.json").unlink()
    status, out, err = call("train", "--resume", "--output-dir", output)
    assert (status, "Resumed from" in out) == (0, True), err
    assert final.read_bytes() == before
    summary = json.loads((output / "training_summary.json").read_text())
    assert (summary["state"], summary["checkpoint"]["digest"]) == ("finished", digest)


def test_a_run_that_another_machine_began_meanwhile_is_not_called_replaced(trained, tmp_path, capsys, monkeypatch):
    """Seen as this job's own only once the lock is held, it is gone on with, and that is said."""
    output = copy_of(trained, tmp_path)
    shutil.rmtree(output / "checkpoints")
    (output / "training_summary.json").unlink()
    answers = iter([False])
    monkeypatch.setattr(RunDirectory, "was_begun_by", lambda self, job: next(answers, True))
    config = configs.load(output / "config.yaml", {"output_dir": str(output), "training.total_timesteps": 600})
    how = {"resume": False, "resume_if_present": False, "overwrite": False}
    assert training.train(config, Signals(), **how) == 0
    out = capsys.readouterr().out
    assert "Replacing the run" not in out
    assert "No checkpoint to resume from: starting at the beginning." in out


@pytest.mark.parametrize("seen", [0, 1])
def test_a_head_that_is_ending_may_save_and_prune_meanwhile(seen, trained, tmp_path, monkeypatch):
    """The first look finds no checkpoint yet, or lists one that is gone when it is read; the run has some all the
    same, and the next attempt waits for the lock instead of refusing."""
    output = copy_of(trained, tmp_path)
    config = configs.load(output / "config.yaml", {"output_dir": str(output)})
    directory = RunDirectory.of(config)
    directory.final_checkpoint().unlink()
    directory.summary.unlink()
    earlier, *others = directory.step_checkpoints()
    for file in others:
        file.unlink()
    true = RunDirectory.step_checkpoints
    looks = []

    def meanwhile(self):
        found = true(self)
        if not looks:  # the head saves and prunes just after the list was made
            earlier.rename(self.step_checkpoint(4096))
        looks.append(found)
        return found if seen or len(looks) > 1 else []

    monkeypatch.setattr(RunDirectory, "step_checkpoints", meanwhile)
    assert resumption.check(config, directory, must_exist=True) == config
    assert len(looks) > 1


# Key by key


def other(section, key, field, value):
    """A value that the key allows and does not have."""
    chosen = {"env.name": "CartPole-v1", "env.num_envs": 64, "training.n_steps": 256, "training.batch_size": 512,
              "hardware.device": "cuda", "training.target_kl": 0.1, "training.duration_hours": 2.0,
              "cluster.interface": "lo", "logging.checkpoint_dir": "there", "parallel.balance": 0.25,
              "cluster.master_addr": "elsewhere", "logging.log_dir": "there", "algorithm": "a2c",
              "model.architecture": "nature"}  # fmt: skip
    if f"{section}.{key}".strip(".") in chosen:
        return chosen[f"{section}.{key}".strip(".")]
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [16]
    allowed = getattr(field.annotation, "__args__", ())
    if isinstance(value, str) and allowed and all(isinstance(choice, str) for choice in allowed):
        return next(choice for choice in allowed if choice != value)
    return 1 if value in (None, "auto") else value + 1 if isinstance(value, int) else value / 2 or 0.5


KEYS = [
    pytest.param(section, key, field, id=f"{section}.{key}".strip("."))
    for section, key, field in configs.fields()
    if key not in ("output_dir", "use_sequential_levels", "distributed_backend", "num_envs_per_worker")
]


@pytest.mark.parametrize(("section", "key", "field"), KEYS)
def test_every_key_may_change_or_stays(section, key, field, tmp_path):
    """Bugs 5, 11: what is learned stays; how it runs, where its files are and when it ends may change."""
    name = f"{section}.{key}".strip(".")
    settings = {"output_dir": str(tmp_path), "algorithm": configs.users_of(name)[0]}
    config = configs.build(settings, {}, source="test")
    (tmp_path / "config.yaml").write_text(configs.to_yaml(config))
    value = configs.to_dict(config)[section][key] if section else configs.to_dict(config)[key]
    changed = configs.build(configs.to_dict(config), {name: other(section, key, field, value)}, source="test")
    assert changed != config
    if MAY_CHANGE in field.metadata:
        assert resumption.check(changed, RunDirectory.of(changed), must_exist=True) == changed
    else:
        with pytest.raises(UserError, match=rf"but this asks for {name} = .* \(it was "):
            resumption.check(changed, RunDirectory.of(changed), must_exist=True)


def test_keys_that_the_algorithm_does_not_use_may_differ(tmp_path):
    config = configs.build({"output_dir": str(tmp_path), "algorithm": "a2c"}, {}, source="test")
    (tmp_path / "config.yaml").write_text(configs.to_yaml(config))
    changed = configs.build(configs.to_dict(config), {"impala.passes": 2, "training.clip_range": 0.1}, source="test")
    assert resumption.check(changed, RunDirectory.of(changed), must_exist=True) == changed


def test_what_is_learned_stays():
    """The other sections say how a run runs; in these every key has to be thought of."""
    keys = [(f"{section}.{key}", MAY_CHANGE in field.metadata) for section, key, field in configs.fields()]
    stays, may = ([name for name, changes in keys if changes is wanted] for wanted in (False, True))
    assert [name for name in stays if name.startswith(("hardware.", "logging."))] == []
    assert [name for name in stays if name.startswith(("parallel.", "cluster."))] == [
        "parallel.num_envs_per_worker", "cluster.sync", "cluster.sync_every",
    ]  # fmt: skip
    assert [name for name in may if name.startswith(("env.", "model."))] == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"parallel.num_workers": 1}, 16),  # 1 x 8 would be 8
        ({"parallel.num_workers": None}, 16),
        ({"parallel.num_workers": 4, "parallel.num_envs_per_worker": 4}, 16),
        ({"parallel.num_workers": 4, "parallel.num_envs_per_worker": None, "env.num_envs": 16}, 16),
        ({"parallel.num_envs_per_worker": 4}, "parallel.num_envs_per_worker = 4"),
        ({"parallel.num_envs_per_worker": None, "env.num_envs": 32}, "env.num_envs = 32"),
        ({"model.architecture": "mlp"}, 16),  # what auto is here
        ({"mode": "distributed"}, "mode = distributed"),
    ],
)
@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_a_run_keeps_its_environments_whoever_shares_them(change, expected, algorithm, tmp_path):
    """Bug 5: cores may be lost or found, environments are part of the task."""
    workers = {"num_workers": 2, "num_envs_per_worker": 8}
    data = {"algorithm": algorithm, "mode": "parallel", "parallel": workers, "output_dir": str(tmp_path)}
    data |= {"env": {"name": "Catch-v0", "num_envs": 16}, "training": {"n_steps": 32, "batch_size": 128}}
    config = configs.build(data, {}, source="test")
    (tmp_path / "config.yaml").write_text(configs.to_yaml(config))
    changed = configs.build(configs.to_dict(config), change, source="test")
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            resumption.check(changed, RunDirectory.of(config), must_exist=True)
    else:
        going_on = resumption.check(changed, RunDirectory.of(config), must_exist=True)
        share = going_on.parallel.num_envs_per_worker
        workers = going_on.parallel.num_workers
        assert (going_on.env.num_envs if share is None else workers * share) == expected


@pytest.mark.parametrize(("num_workers", "share", "is_refused"), [(2, 4, True), (2, 8, False), ("auto", 4, False)])
def test_a_share_asked_of_a_run_that_has_none_is_not_ignored_in_silence(
    num_workers, share, is_refused, tmp_path, capsys
):
    """A resume on other cores leaves num_envs_per_worker null; one that makes another number is refused or named."""
    data = {"mode": "parallel", "parallel": {"num_workers": 4}, "output_dir": str(tmp_path)}
    data |= {"env": {"name": "Catch-v0", "num_envs": 16}, "training": {"n_steps": 32, "batch_size": 128}}
    data["parallel"]["num_envs_per_worker"] = None
    config = configs.build(data, {}, source="test")
    (tmp_path / "config.yaml").write_text(configs.to_yaml(config))
    change = {"parallel.num_workers": num_workers, "parallel.num_envs_per_worker": share}
    changed = configs.build(configs.to_dict(config), change, source="test")
    if is_refused:
        with pytest.raises(UserError, match=r"parallel.num_envs_per_worker = 4 \(it was null\)"):
            resumption.check(changed, RunDirectory.of(config), must_exist=True)
        return
    going_on = resumption.check(changed, RunDirectory.of(config), must_exist=True)
    assert going_on.parallel.num_envs_per_worker in (None, 8)
    said = "The run keeps its 16 environments" in capsys.readouterr().out
    assert said == (num_workers == "auto")


def test_workers_of_a_distributed_run_are_machines_when_it_is_resumed(tmp_path):
    """--num-workers means machines, also when the mode stands in the run's own config alone."""
    data = {"mode": "distributed", "cluster": {"num_workers": 2}, "output_dir": str(tmp_path)}
    (tmp_path / "config.yaml").write_text(configs.to_yaml(configs.build(data, {}, source="test")))
    call = ["train", "--resume", "--num-workers", "3", "--workers-per-node", "5", "--output-dir", str(tmp_path)]
    config = config_from(build_parser().parse_args(call))
    assert (config.mode, config.cluster.num_workers, config.parallel.num_workers) == ("distributed", 3, 5)
