"""The subcommands that choose and explain speed and settings: `rlcb tune`, `profile`, `scaling` and `search`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.cli.arguments import FLAGS, attribute, config_from, settings_from, start_signals
from rl_cluster_benchmark.config.traits import TRAITS
from rl_cluster_benchmark.core.errors import UserError

TUNE_DIR, PROFILE_DIR, SCALING_DIR, PROJECTION_DIR = "runs/tune", "runs/profile", "runs/scaling", "runs/projection"


def tune(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.tune.tuning import TuningSettings, tune

    given = _given_keys(args)
    if args.mode is None and args.config is None:
        args.mode = "parallel"
    output_dir = Path(args.output_dir or TUNE_DIR)
    config = _config(args)
    settings = settings_from(TuningSettings, args, output_dir=output_dir, given=given)
    return tune(config, settings, start_signals())


def _config(args: argparse.Namespace) -> Any:
    """Return the config of the runs to be made; --output-dir is the place of what is written about them."""
    args.output_dir = None
    return config_from(args)


def _given_keys(args: argparse.Namespace) -> set[str]:
    """Return the config keys that the command line sets."""
    from rl_cluster_benchmark.config.config_files import home_of, parse_assignment

    flags = {key for flag, (key, _, _) in FLAGS.items() if getattr(args, attribute(flag)) is not None}
    top = {name for name in ("algorithm", "mode") if getattr(args, name) is not None}
    return flags | top | {home_of(parse_assignment(text)[0]) for text in args.set}


def profile(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.profile.profile import ProfileSettings, profile

    if args.of is not None:
        from rl_cluster_benchmark.tools.profile.finished import explain

        return explain(args.of)
    if args.mode is None and args.config is None:
        args.mode = "parallel"
    settings = settings_from(ProfileSettings, args, output_dir=Path(args.output_dir or PROFILE_DIR))
    return profile(_config(args), settings, start_signals())


def _project(args: argparse.Namespace) -> int:
    if args.envs_per_worker is not None or args.repeats != 1:
        raise UserError("--envs-per-worker and --repeats belong to a sweep over workers, not to --project.")
    if args.network is not None and (args.bandwidth is not None or args.round_trip is not None):
        raise UserError("--network has a bandwidth and a round trip of its own: give one or the other.")
    if args.workers is not None:
        if len(args.workers) > 1:
            raise UserError("With --project, --workers is one number: the workers of each machine.")
        args.set.insert(0, f"parallel.num_workers={args.workers[0]}")
    from rl_cluster_benchmark.tools.projection.projection import NODES, ProjectionSettings, project

    args.mode = "distributed" if TRAITS[args.algorithm or "ppo"].is_in_step else "parallel"
    config = config_from(args)
    output_dir = Path(config.output_dir or PROJECTION_DIR)
    settings = settings_from(ProjectionSettings, args, nodes=args.nodes or NODES, output_dir=output_dir)
    return project(config, settings, start_signals())


def scaling(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.scaling.sweep import SweepSettings, scaling

    if args.project:
        return _project(args)
    if args.num_envs is not None and args.envs_per_worker is not None:
        raise UserError("--num-envs fixes the total (strong scaling), --envs-per-worker the share (weak): give one.")
    if args.num_envs is not None:
        args.set.insert(0, "parallel.num_workers=null")  # the preset's number of workers says nothing here
    config = config_from(args)
    settings = settings_from(SweepSettings, args, output_dir=Path(config.output_dir or SCALING_DIR))
    return scaling(config, settings, start_signals())


def search(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.search import searching
    from rl_cluster_benchmark.tools.search.sampling import require_optuna
    from rl_cluster_benchmark.tools.search.space_files import read_space

    require_optuna()
    if args.trials is None and args.budget is None:
        raise UserError("Say how long to search: --trials N, --budget HOURS, or both.")
    if args.enqueue is not None and args.space is None:
        raise UserError("--enqueue needs --space: candidates are a part of what a search is begun with.")
    space = read_space(args.space, args.enqueue) if args.space is not None else None
    seconds = args.budget * 3600 if args.budget is not None else None
    settings = searching.SearchSettings(args.output_dir, args.trials, seconds, args.jobs)
    return searching.search(space, settings, start_signals())
