"""The subcommands that train and evaluate: `rlcb train`, `evaluate`, `quickstart`, and `config`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rl_cluster_benchmark.cli.arguments import config_from, settings_from, start_signals, without_effect

if TYPE_CHECKING:
    from rl_cluster_benchmark.config.schema import Config
    from rl_cluster_benchmark.core.stop import Signals


def train(args: argparse.Namespace) -> int:
    config = config_from(args)
    if not config.is_sequential:
        from rl_cluster_benchmark.processes.pool import start_server

        start_server(config.env.game)  # it loads what workers need while this process imports torch
    signals = _start_process(config)
    for sentence in without_effect(args, config):  # not before: what is printed from here on holds nothing up
        print(sentence, file=sys.stderr, flush=True)
    from rl_cluster_benchmark.training.training import train

    return train(
        config,
        signals,
        resume=args.resume,
        resume_if_present=args.resume_if_present,
        overwrite=args.overwrite,
        node_rank=args.node_rank,
    )


def evaluate(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.config.config_files import load, parse_assignment
    from rl_cluster_benchmark.machine import detection, process

    overrides = dict(parse_assignment(text) for text in args.set)
    if args.env is not None:
        overrides["env.name"] = args.env
    threads = {"hardware.num_threads": overrides.get("hardware.num_threads")}
    num_threads = args.num_threads or load(None, threads).hardware.num_threads or detection.detect().usable_cores
    process.prepare_process(num_threads)
    from rl_cluster_benchmark.tools.evaluation.evaluate import EvaluationSettings, evaluate_checkpoint

    return evaluate_checkpoint(settings_from(EvaluationSettings, args, overrides=overrides, num_threads=num_threads))


def config(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.config import config_files as configs

    if args.markdown:
        print(configs.reference_markdown(), end="")
    elif args.presets:
        print("\n".join(configs.presets()))
    else:
        config = config_from(args)
        workers = config.parallel.num_workers
        if config.is_parallel and workers is not None and config.impala.num_actors is None:
            config = configs.with_workers(config, workers)  # num_envs as the run will have it
        print(configs.to_yaml(config), end="")
    return 0


def quickstart(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.config import config_files

    overrides = {"output_dir": args.output_dir, "training.duration_hours": args.duration}
    config = config_files.load("quickstart", overrides)
    signals = _start_process(config)
    from rl_cluster_benchmark.tools.quickstart import quickstart

    return quickstart(config, signals, overwrite=args.overwrite)


def _start_process(config: Config) -> Signals:
    """Catch signals and set the threads, before anything that imports numpy or torch is imported."""
    from rl_cluster_benchmark.machine import planning, process

    signals = start_signals()
    process.prepare_process(planning.plan(config).num_threads)
    return signals
