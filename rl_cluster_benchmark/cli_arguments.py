"""Command-line arguments that are keys of a config, and the kinds of values that arguments have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_cluster_benchmark.config import Config

PLACES = ("algorithm", "mode", "output_dir", "logging.log_dir", "logging.checkpoint_dir")  # where a run is

# flag -> (config key, placeholder, help)
FLAGS: dict[str, tuple[str, str, str]] = {
    "--env": ("env.name", "GAME", "a Procgen game: coinrun, starpilot, ... (or CartPole-v1, Catch-v0)"),
    "--seed": ("env.seed", "N", "seed of everything random in the run"),
    "--total-timesteps": ("training.total_timesteps", "N", "stop after this many environment steps"),
    "--duration": ("training.duration_hours", "HOURS", "stop after this many hours, if that comes first"),
    "--num-envs": ("env.num_envs", "N", "environments stepped together, over all workers"),
    "--batch-size": ("training.batch_size", "N", "samples in a minibatch"),
    "--learning-rate": ("training.learning_rate", "RATE", "step size of the optimiser"),
    "--num-threads": ("hardware.num_threads", "N", "threads to use; default: one per physical core"),
    "--num-workers": (
        "parallel.num_workers",
        "N",
        "worker processes (IMPALA: actors), auto: one per core; machines in distributed mode",
    ),
    "--num-nodes": ("cluster.num_workers", "N", "machines that take part (distributed mode)"),
    "--workers-per-node": ("parallel.num_workers", "N", "worker processes on each machine (distributed mode)"),
    "--master-addr": ("cluster.master_addr", "HOST", "address of the head machine (distributed mode)"),
    "--master-port": ("cluster.master_port", "PORT", "a free port there (distributed mode)"),
    "--num-envs-per-worker": ("parallel.num_envs_per_worker", "N", "environments of each worker (parallel mode)"),
    "--device": ("hardware.device", "DEVICE", "cpu, or cuda where torch has it"),
    "--output-dir": ("output_dir", "DIR", "directory for everything the run writes"),
    "--checkpoint-dir": ("logging.checkpoint_dir", "DIR", "where checkpoints go without --output-dir"),
    "--log-dir": ("logging.log_dir", "DIR", "where logs go without --output-dir"),
}


def add_config_arguments(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    parser.add_argument("--algorithm", type=str.lower, metavar="NAME", help="ppo (default), a2c, a3c or impala")
    if "--mode" not in without:
        parser.add_argument(
            "--mode", type=str.lower, metavar="MODE", help="sequential (default), parallel or distributed"
        )
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file or a preset's name; default: the preset <algorithm>_<mode>"
    )
    for flag, (key, placeholder, text) in FLAGS.items():
        if flag in without:
            parser.set_defaults(**{attribute(flag): None})
            continue
        parser.add_argument(flag, metavar=placeholder, help=f"{text} [{key}]")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other key: --set training.gamma=0.99"
    )


def attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be a whole number of at least 1")
    return int(text)


def rank(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be a whole number from 0")
    return int(text)


def seed(text: str) -> int:
    if not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be a whole number from 0 to 2^32 - 1")
    return int(text)


def numbers(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be a number of seconds, at most a day")
    return number


def config_from(args: argparse.Namespace) -> Config:
    """Defaults < YAML < command line. A run that is resumed starts from its own config.yaml."""
    from rl_cluster_benchmark import config_files as configs
    from rl_cluster_benchmark.run.directory import RunDirectory

    overrides: dict[str, object] = {}
    for name in ("algorithm", "mode"):
        if getattr(args, name) is not None:
            overrides[name] = getattr(args, name)
    mode = args.mode or (configs.read_yaml(args.config).get("mode") if args.config is not None else None)
    for flag, (key, _, _) in FLAGS.items():
        text = getattr(args, attribute(flag))
        if text is not None:
            key = "cluster.num_workers" if flag == "--num-workers" and mode == "distributed" else key
            overrides[key] = text
    if args.num_envs is not None and args.num_envs_per_worker is None:
        overrides["parallel.num_envs_per_worker"] = None  # the total was asked for; a preset's share does not count
    if args.num_workers is not None and mode != "distributed":
        overrides["impala.num_actors"] = None  # likewise: a preset's split of the cores
    overrides |= dict(configs.parse_assignment(text) for text in args.set)
    path = args.config
    if path is None:
        place = "cpu_cluster" if args.mode == "distributed" else args.mode or "sequential"
        preset = f"{args.algorithm or 'ppo'}_{place}"
        path = preset if preset in configs.presets() else None
        if getattr(args, "resume", False):
            places = {key: overrides[key] for key in PLACES if key in overrides}
            own = RunDirectory.of(configs.load(path, places)).config
            path = own if own.is_file() else path
    return configs.load(path, overrides)
