"""Command-line arguments that are keys of a config."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rl_cluster_benchmark.config.traits import is_distributed

if TYPE_CHECKING:
    from rl_cluster_benchmark.config.schema import Config
    from rl_cluster_benchmark.core.stop import Signals

Settings = TypeVar("Settings")

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
        "--config",
        metavar="FILE",
        help="a YAML file or a preset's name; default: <algorithm>_procgen, <algorithm>_toy for CartPole-v1 and "
        "Catch-v0, <algorithm>_cpu_cluster in distributed mode",
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


def settings_from(kind: Callable[..., Settings], args: argparse.Namespace, **others: object) -> Settings:
    """Return settings of this kind: `others`, and for the other fields the arguments of the same names."""
    names = (field.name for field in dataclasses.fields(kind) if field.name not in others)  # type: ignore[arg-type]
    return kind(**others, **{name: getattr(args, name) for name in names if hasattr(args, name)})


def start_signals() -> Signals:
    """Return the signals by which this command is asked to end, caught from now on."""
    from rl_cluster_benchmark.core.stop import Signals

    signals = Signals()
    signals.install()
    return signals


def config_from(args: argparse.Namespace) -> Config:
    """Return the config: defaults < YAML < command line. A run that is resumed starts from its own config.yaml."""
    from rl_cluster_benchmark.config import config_files as configs

    named = {name: getattr(args, name) for name in ("algorithm", "mode") if getattr(args, name) is not None}
    flags = {flag: text for flag in FLAGS if (text := getattr(args, attribute(flag))) is not None}
    assigned = dict(configs.parse_assignment(text) for text in args.set)
    given = named | {FLAGS[flag][0]: text for flag, text in flags.items()} | assigned
    path = args.config
    own = preset = None
    if path is None:
        preset = getattr(args, "default_config", None) or configs.preset_of(
            given.get("algorithm"), given.get("mode"), given.get("env.name")
        )
        own = _own_config(args, preset, given)
        path = own or preset
    mode = given.get("mode")
    if mode is None and path is not None and path != preset:
        mode = configs.read_yaml(path).get("mode")
    overrides: dict[str, object] = dict(named)
    for flag, text in flags.items():
        is_machines = flag == "--num-workers" and is_distributed(mode)
        overrides["cluster.num_workers" if is_machines else FLAGS[flag][0]] = text
    if preset is not None and own is None and given.get("training.duration_hours") is not None:
        # A preset for toy games ends after seconds: the time that was asked for would never be reached.
        steps_of_preset = configs.load(preset).training.total_timesteps
        overrides.setdefault("training.total_timesteps", max(steps_of_preset, configs.DEFAULT_STEPS))
    overrides = configs.in_place_of_others(overrides | assigned)
    if {"parallel.num_workers", "impala.num_actors", "impala.num_learners"} & overrides.keys():
        overrides.setdefault("impala.split", "given")  # somebody has chosen
    return configs.load(path, configs.AS_IT_WAS | overrides if own else overrides)


def without_effect(args: argparse.Namespace, config: Config) -> list[str]:
    """Return a sentence for each key on the command line that the config's algorithm does not use."""
    from rl_cluster_benchmark.config import config_files as configs

    flags = [key for flag, (key, _, _) in FLAGS.items() if getattr(args, attribute(flag)) is not None]
    keys = dict.fromkeys([*flags, *(configs.parse_assignment(text)[0] for text in args.set)])
    return [sentence for key in keys if (sentence := configs.without_effect(key, config.algorithm)) is not None]


def _own_config(args: argparse.Namespace, path: str | None, given: Mapping[str, object]) -> Path | None:
    """Return the config.yaml of the run that is to be resumed, if there is one."""
    from rl_cluster_benchmark.config import config_files as configs
    from rl_cluster_benchmark.run.directory import RunDirectory

    if not (getattr(args, "resume", False) or getattr(args, "resume_if_present", False)):
        return None
    own = RunDirectory.of(configs.load(path, {key: given[key] for key in PLACES if key in given})).config
    return own if own.is_file() else None
