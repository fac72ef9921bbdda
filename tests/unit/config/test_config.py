"""Config files, flags and the sentences that answer mistakes."""

import re
from typing import get_args

import pytest
import yaml
from helpers.commands import ROOT, rlcb

from rl_cluster_benchmark.cli.arguments import config_from, without_effect
from rl_cluster_benchmark.cli.main import build_parser, main
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import Algorithm, Config
from rl_cluster_benchmark.core.errors import UserError

# The YAML that the first documents of the project printed.
SNIPPETS = {
    "readme": """
env:
  num_envs: 32  # Reduced for CPU efficiency

training:
  n_steps: 128  # Optimized for CPU memory
  batch_size: 1024  # CPU-friendly batch size
  n_epochs: 4

hardware:
  device: "cpu"
  num_threads: null  # Auto-detect
""",
    "cluster": """
cluster:
  num_workers: 4
  distributed_backend: "gloo"  # CPU-optimized backend
  master_addr: "localhost"
  master_port: 29500
""",
    "ppo": """
env:
  name: "procgen-coinrun-v0"
  seed: 42

training:
  num_envs: 64              # Total environments
  n_steps: 256              # Steps per rollout
  total_timesteps: 25_000_000
  batch_size: 2048          # Batch for training
  n_epochs: 4               # Epochs per update
  learning_rate: 0.0003
  gamma: 0.999
  gae_lambda: 0.95
  clip_range: 0.2
  ent_coef: 0.01
  vf_coef: 0.5
  max_grad_norm: 0.5
  log_interval: 1
  save_interval: 100
  device: cpu
  num_threads: 16           # CPU threads

logging:
  checkpoint_dir: "./checkpoints/ppo_sequential_ryzen7"
  log_dir: "./logs"
""",
    "impala": """
env:
  name: "procgen-coinrun-v0"
  seed: 42

training:
  num_envs: 48              # Total environments
  n_steps: 128              # Rollout length
  total_timesteps: 25_000_000
  learning_rate: 0.0001     # Lower LR for IMPALA

impala:
  vtrace_clip_rho_threshold: 1.0
  vtrace_clip_pg_rho_threshold: 1.0
  entropy_coef: 0.01
  value_coef: 0.5
  max_grad_norm: 40.0       # Higher for IMPALA

hardware:
  device: "cpu"
  num_threads: 16
""",
    "sequential": """
env:
  name: "procgen-coinrun-v0"
  num_envs: 32              # Total environments
  seed: 42

training:
  n_steps: 128              # Steps per rollout
  batch_size: 1024          # Batch size
  n_epochs: 4               # Training epochs

hardware:
  device: "cpu"
  num_threads: null         # Auto-detect
""",
    "parallel": """
parallel:
  num_workers: 4            # Number of parallel workers
  num_envs_per_worker: 8    # Envs per worker

training:
  n_steps: 128
  batch_size: 2048          # Larger batch for parallel
  n_epochs: 4

hardware:
  device: "cpu"
  num_threads: null         # Auto-detect per worker
""",
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_documented_snippets_load_unchanged(name, tmp_path):
    file = tmp_path / "snippet.yaml"
    file.write_text(SNIPPETS[name])
    config = configs.load(file)
    moved = {"num_envs": "env", "device": "hardware", "num_threads": "hardware"}
    for section, values in yaml.safe_load(SNIPPETS[name]).items():
        for key, value in values.items():
            home = moved.get(key, section) if section == "training" else section
            assert getattr(getattr(config, home), key) == value, key


PRESETS = {  # name: (environments, workers x environments each, steps, batch)
    "ppo_sequential": (32, None, 128, 1024),
    "ppo_parallel": (None, (4, 8), 128, 2048),
    "ppo_sequential_highend": (112, None, 128, 2048),
    "ppo_parallel_highend": (None, (7, 16), 128, 2048),
    "ppo_sequential_ryzen7": (64, None, 256, 2048),
    "ppo_parallel_ryzen7": (None, (4, 16), 256, 2048),
    "impala_sequential": (32, None, 128, None),
    "impala_parallel": (None, (4, 8), 128, None),
    "impala_sequential_ryzen7": (48, None, 128, None),
    "impala_parallel_ryzen7": (None, (4, 12), 128, None),
    "impala_procgen": (None, None, 32, 1024),
    "a3c_parallel": (None, None, 16, None),
    "a3c_sequential": (64, None, 16, None),
    "ppo_cpu_cluster": (None, None, 128, 2048),
    "a2c_cpu_cluster": (None, None, 16, None),
    "impala_cpu_cluster": (None, None, 128, None),
    "ppo_procgen_paper": (64, None, 256, 2048),
    "ppo_procgen": (64, None, 256, 2048),
    "ppo_toy": (16, None, 64, 256),
    "impala_toy": (16, None, 16, 128),
}
ALGORITHMS = ("ppo", "a2c", "a3c", "impala")


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = configs.load(ROOT / "config" / f"{name}.yaml")
    envs, workers, steps, batch = PRESETS[name]
    assert config.algorithm == name.split("_")[0]
    assert config.training.n_steps == steps
    if envs is not None:
        assert (config.mode, config.env.num_envs) == ("sequential", envs)
    if workers is not None:
        assert config.mode == "parallel"
        assert (config.parallel.num_workers, config.parallel.num_envs_per_worker) == workers
    if batch is not None:
        assert config.training.batch_size == batch


def test_the_published_setting():
    config = configs.load("ppo_procgen_paper")
    training, env = config.training, config.env
    assert (env.distribution_mode, env.num_levels, env.start_level) == ("easy", 200, 0)
    assert (training.learning_rate, training.n_epochs, config.rollout_size // config.batch_size) == (5e-4, 3, 8)
    assert training.clip_value_loss
    assert training.normalize_reward
    assert not training.anneal_lr
    assert training.adam_eps == 1e-5


def config_of(*call):
    return config_from(build_parser().parse_args(["train", *call]))


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("train_*.py")))
def test_the_scripts_keep_their_documented_defaults(script):
    """`train_ppo_sequential.py` takes config/ppo_sequential.yaml, as its documentation says."""
    (call,) = re.findall(r"^CALL = (.*)$", (ROOT / script).read_text(), re.MULTILINE)
    _, *call = re.findall(r'"([^"]+)"', call)
    config = config_of(*call)
    place = "cpu_cluster" if config.mode == "distributed" else config.mode
    assert config == configs.load(f"{config.algorithm}_{place}", {"mode": config.mode})
    assert config_of(*call, "--config", "quickstart").training.n_steps == configs.load("quickstart").training.n_steps


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_that_the_algorithm_does_not_use_are_not_recorded(algorithm, tmp_path):
    config = configs.load(None, {"algorithm": algorithm})
    recorded = yaml.safe_load(configs.to_yaml(config))
    assert ("impala" in recorded) == (algorithm == "impala")
    for key, users in {
        "n_epochs": ["ppo"],
        "clip_range": ["ppo"],
        "batch_size": ["ppo", "impala"],
        "gae_lambda": ["ppo", "a2c", "a3c"],
        "normalize_advantage": ["ppo", "a2c", "a3c"],
        "gamma": list(ALGORITHMS),
    }.items():
        assert (key in recorded["training"]) == (algorithm in users), key
    file = tmp_path / "config.yaml"
    file.write_text(configs.to_yaml(config))
    assert configs.load(file) == config, "what is left out has its default"


def test_a_key_without_effect_is_named():
    def said(*call):
        args = build_parser().parse_args(["train", *call])
        return without_effect(args, config_from(args))

    call = ("--algorithm", "impala", "--set", "training.clip_range=0.1", "--num-envs", "8")
    assert said(*call) == ["training.clip_range has no effect: impala does not use it (ppo does)."]
    call = ("--algorithm", "a2c", "--set", "impala.passes=2", "--set", "training.gamma=0.9", "--num-workers", "2")
    assert said(*call) == ["impala.passes has no effect: a2c does not use it (impala does)."]


def test_precedence_default_yaml_command_line(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("training: {gamma: 0.9, num_envs: 16}\nenv: {seed: 1}\n")
    config = configs.load(file, {"env.seed": 2, "env.num_envs": 8})
    assert (config.training.gamma, config.training.gae_lambda) == (0.9, 0.95)
    assert (config.env.seed, config.env.num_envs) == (2, 8)
    assert configs.load(file, {"training.num_envs": 4}).env.num_envs == 4


def test_a_config_written_out_reads_back_the_same(tmp_path):
    config = configs.load("ppo_sequential", {"training.duration_hours": 0.5, "model.channels": [4]})
    file = tmp_path / "config.yaml"
    file.write_text(configs.to_yaml(config))
    assert configs.load(file) == config


MISTAKES = {
    "training: {batch_sise: 3}": "training.batch_sise is not a known key; did you mean training.batch_size?",
    "training: {memory_format: contiguous}": "training.memory_format is not a known key; did you mean hardware.memory",
    "traning: {gamma: 1}": "traning is not a known key; did you mean training?",
    "training: {gamma: high}": "training.gamma = 'high' is not allowed; it must be a number.",
    "training: {gamma: 1.5}": "training.gamma = 1.5 is not allowed; it must be at most 1",
    "training: {n_steps: 0}": "training.n_steps = 0 is not allowed; it must be at least 1.",
    "training: {n_steps: 2.5}": "training.n_steps = 2.5 is not allowed; it must be a whole number.",
    "training: {learning_rate: -1}": "training.learning_rate = -1 is not allowed; it must be greater than 0",
    "training: {batch_size: 1000}": "batch_size = 1000 does not divide the rollout of 32 envs x 128 steps = 4096",
    "env: {num_envs: -4}": "env.num_envs = -4 is not allowed; it must be at least 1.",
    "env: {name: coinrn}": "env.name = coinrn is not a known environment; did you mean coinrun?",
    "env: {name: coinrun, distribution_mode: memory}": "distribution_mode memory does not exist for coinrun; games",
    "env: {name: coinrun, distribution_mode: exploration}": "exploration is a single level, of which none can be held",
    "hardware: {precision: fp16}": "hardware.precision = 'fp16' is not allowed; it must be 'auto', 'float32' or 'b",
    "hardware: {device: tpu}": "hardware.device = 'tpu' is not allowed; it must be cpu, cuda or cuda:N.",
    "training: 5": "training = 5 is not allowed; it must be a section with keys, not a single value.",
    "algorithm: dqn": "algorithm = 'dqn' is not allowed; it must be 'ppo', 'a2c', 'a3c' or 'impala'.",
    "- a list": "must hold sections such as 'training:', but holds a list.",
    "training: {gamma: [": "is not valid YAML at line 1",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_answered_with_a_sentence(text, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        configs.load(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert MISTAKES[text] in message
    assert "\n" not in message


def test_the_sizes_that_would_divide_are_named():
    with pytest.raises(UserError, match=r"sizes near it that do: 128, 256, 512, 1024\."):
        configs.load(None, {"training.batch_size": 1000})


def test_a_batch_larger_than_the_rollout_is_the_rollout():
    assert configs.load(None, {"env.num_envs": 4, "training.batch_size": 2048}).batch_size == 512


def test_missing_file_names_the_nearest_preset():
    with pytest.raises(
        UserError, match=r"Config file ppo_sequental\.yaml does not exist\. Did you mean .* ppo_sequential"
    ):
        configs.load("ppo_sequental.yaml")


def test_flags_and_set_on_the_command_line(tmp_path):
    done = rlcb(
        "config", "--num-envs", 8, "--num-threads", 3, "--batch-size", 256, "--total-timesteps", "1_000_000",
        "--learning-rate", "1e-3", "--checkpoint-dir", "c", "--log-dir", "l", "--env", "procgen:procgen-maze-v0",
        "--seed", 7, "--duration", 0.5, "--output-dir", "o", "--config", "ppo_sequential", "--num-workers", 2,
        "--num-envs-per-worker", 4, "--set", "training.gamma=0.9", "--set", "model.channels=[8, 16]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    config = Config.model_validate(yaml.safe_load(done.stdout))
    assert (config.env.num_envs, config.env.name, config.env.seed) == (8, "procgen-maze-v0", 7)
    assert (config.hardware.num_threads, config.output_dir) == (3, "o")
    assert (config.training.batch_size, config.training.total_timesteps) == (256, 1_000_000)
    assert (config.training.learning_rate, config.training.duration_hours) == (1e-3, 0.5)
    assert (config.logging.checkpoint_dir, config.logging.log_dir) == ("c", "l")
    assert (config.parallel.num_workers, config.parallel.num_envs_per_worker) == (2, 4)
    assert (config.training.gamma, config.model.channels) == (0.9, [8, 16])


def test_names_may_be_written_in_capitals_as_the_summaries_do(capsys):
    assert main(["config", "--algorithm", "IMPALA", "--mode", "Parallel"]) == 0
    config = Config.model_validate(yaml.safe_load(capsys.readouterr().out))
    assert (config.algorithm, config.mode) == ("impala", "parallel")


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize(
    ("call", "task"),
    [
        ((), "procgen"),
        (("--mode", "parallel", "--env", "starpilot"), "procgen"),
        (("--env", "Catch-v0"), "toy"),
        (("--mode", "parallel", "--set", "env.name=CartPole-v1"), "toy"),
        (("--mode", "distributed"), "cpu_cluster"),
    ],
)
def test_without_a_config_the_preset_for_the_game_is_taken(algorithm, call, task, capsys):
    assert main(["config", "--algorithm", algorithm, *call]) == 0
    taken = capsys.readouterr().out
    assert main(["config", "--algorithm", algorithm, *call, "--config", f"{algorithm}_{task}"]) == 0
    assert taken == capsys.readouterr().out


def printed(capsys, *args):
    assert main(["config", *args]) == 0
    return Config.model_validate(yaml.safe_load(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        (("--env", "Catch-v0"), 400_000),
        (("--env", "Catch-v0", "--duration", "1"), 25_000_000),
        (("--env", "Catch-v0", "--duration", "1", "--total-timesteps", "1000"), 1000),
        (("--env", "Catch-v0", "--duration", "1", "--set", "training.total_timesteps=1000"), 1000),
        (("--env", "Catch-v0", "--config", "ppo_toy", "--duration", "1"), 400_000),
        (("--env", "Catch-v0", "--set", "training.duration_hours=null"), 400_000),
        (("--mode", "distributed", "--duration", "1"), 100_000_000),
    ],
)
def test_a_duration_is_not_cut_short_by_a_preset_for_toy_games(args, steps, capsys):
    assert printed(capsys, *args).training.total_timesteps == steps


def test_the_mode_may_be_set_in_either_way(capsys):
    """In distributed mode --num-workers is the number of machines."""
    flag = printed(capsys, "--mode", "distributed", "--num-workers", "2")
    assert flag == printed(capsys, "--set", "mode=distributed", "--num-workers", "2")
    assert flag.cluster.num_workers == 2


def test_a_split_that_somebody_chose_is_not_called_measured(tmp_path, capsys):
    file = tmp_path / "measured.yaml"
    file.write_text("{algorithm: impala, mode: parallel, impala: {split: measured, num_learners: 2}}")
    assert printed(capsys, "--config", str(file)).impala.split == "measured"
    for args in (("--num-workers", "3"), ("--set", "impala.num_learners=3"), ("--set", "impala.num_actors=3")):
        assert printed(capsys, "--config", str(file), *args).impala.split == "given"


def test_a_section_is_not_set_as_a_whole(capsys):
    """That would reset all keys of it that are not mentioned."""
    assert main(["config", "--config", "ppo_toy", "--set", "training={learning_rate: 0.01}"]) == 2
    assert "training is a section; name its keys, for example training.total_timesteps." in capsys.readouterr().err


def test_a_number_of_workers_replaces_a_presets_split_of_the_cores(capsys):
    assert main(["config", "--config", "impala_procgen", "--num-workers", "3"]) == 0
    config = Config.model_validate(yaml.safe_load(capsys.readouterr().out))
    assert (config.impala.num_actors, config.parallel.num_workers) == (None, 3)


@pytest.mark.parametrize(
    ("args", "envs", "workers"),
    [
        (("--set", "env.num_envs=64"), (64, None), (4, None)),
        (("--set", "training.num_envs=64"), (64, None), (4, None)),
        (("--set", "parallel.num_envs_per_worker=16"), (64, 16), (4, None)),
        (("--set", "env.num_envs=64", "--set", "parallel.num_envs_per_worker=16"), (64, 16), (4, None)),
        (("--num-envs", "64", "--set", "parallel.num_envs_per_worker=16"), (64, 16), (4, None)),
        (("--set", "parallel.num_workers=2"), (16, 8), (2, None)),
        (("--config", "impala_procgen", "--set", "parallel.num_workers=3"), (64, None), (3, None)),
        (("--config", "impala_procgen", "--num-workers=3", "--set", "impala.num_actors=2"), (64, None), (3, 2)),
        (("--config", "impala_procgen", "--mode=distributed", "--workers-per-node=3"), (64, None), (3, None)),
    ],
)
def test_what_is_asked_for_counts_whatever_a_preset_says_in_other_words(args, envs, workers, capsys):
    """`ppo_parallel` has four workers with eight environments each, `impala_procgen` as many actors as suit."""
    config = printed(capsys, "--config", "ppo_parallel", "--mode", "parallel", *args)
    assert (config.env.num_envs, config.parallel.num_envs_per_worker) == envs
    assert (config.parallel.num_workers, config.impala.num_actors) == workers


def test_workers_auto_is_one_per_core(capsys):
    assert main(["config", "--mode", "parallel", "--num-workers", "auto"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["parallel"]["num_workers"] is None


def test_the_printed_config_has_the_environments_of_all_workers(capsys):
    assert main(["config", "--config", "ppo_parallel_ryzen7", "--num-workers", "3", "--batch-size", "1024"]) == 0
    assert Config.model_validate(yaml.safe_load(capsys.readouterr().out)).env.num_envs == 3 * 16


def test_the_reference_in_the_docs_is_up_to_date():
    assert (ROOT / "docs" / "configuration.md").read_text() == configs.reference_markdown(), "run: make docs"


def test_every_key_is_documented():
    for section, key, field in configs.fields():
        assert field.description, f"{section}.{key}"
