"""The subcommands that choose and explain speed: `rlcb tune` and `rlcb profile`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.cli.arguments import (
    FLAGS,
    add_config_arguments,
    attribute,
    config_from,
    seconds,
    settings_from,
    start_signals,
)

TUNE_DIR, PROFILE_DIR = "runs/tune", "runs/profile"
SET_BY_MEASURING = (
    "--total-timesteps", "--duration", "--checkpoint-dir", "--log-dir", "--device", "--num-nodes", "--workers-per-node",
    "--master-addr", "--master-port",
)  # fmt: skip

TUNE_HELP = """\
Find the fastest way to run a config on this machine by short measured trials: how many processes and threads,
precision, what computes the network (this package's C code or torch), samples per pass, balance; for IMPALA the split
of the cores between actors and learners. It ends within --budget seconds with a table and a YAML file for
`rlcb train --config`. Ctrl-C writes the best so far.

The learning problem stays as it is: environments, steps, batch, epochs and everything under `training` are never
changed, unless --allow-learning-changes is given, and then the table and the file say what. What is given on the
command line (--num-workers 4, --set hardware.precision=float32) is kept; everything else about the machine is tried.
Without --mode, PPO and A2C are tried in one process and in several.
"""
TUNE_EXAMPLES = """\
examples:
  rlcb tune --config ppo_procgen_paper                    PPO, the published setting: five minutes
  rlcb tune --config impala_procgen --mode parallel        how many cores act, how many learn
  rlcb tune --config ppo_procgen_paper --budget 120 --mode parallel
  rlcb tune --config ppo_procgen_paper --exhaustive       and check the choice against every setting there is
  rlcb train --config runs/tune/tuned.yaml --output-dir runs/tuned
"""
PROFILE_HELP = """\
Train for a few seconds and say where the time goes: by phase in every process, by operator, with the C code and the
environments as rows of their own; GFLOP/s of the network against what this machine's matrix multiplication reaches;
memory traffic, page faults, context switches, cores; and in a few sentences what limits the run and what would help.
A run with --trace can be looked at in Chrome; with py-spy installed a flame graph is drawn.
"""
PROFILE_EXAMPLES = """\
examples:
  rlcb profile --config ppo_procgen_paper --mode parallel
  rlcb profile --config ppo_procgen_paper --trace trace.json     then open chrome://tracing or ui.perfetto.dev
  rlcb profile --config impala_procgen --mode parallel           who waits for whom
  rlcb profile --config runs/tune/tuned.yaml                     what `rlcb tune` found
  rlcb profile --of runs/coinrun                                 what limited a run that is over, on a cluster too
"""


def add_performance_commands(commands: Any) -> None:
    _add_tune(commands)
    _add_profile(commands)


def _add_profile(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="say where the time of a run goes and what limits it",
        description=PROFILE_HELP,
        epilog=PROFILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=seconds, default=15.0, metavar="S", help="measured after the first update; default: 15"
    )
    parser.add_argument(
        "--of", type=Path, metavar="DIR", help="train nothing: say what limited the run in this directory, of any mode"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of one process of each kind")
    parser.add_argument(
        "--no-peak", action="store_false", dest="peak", help="do not measure what the machine could do: seconds less"
    )
    parser.add_argument(
        "--no-flame", action="store_false", dest="flame", help="draw no flame graph even if py-spy is there"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier profile in the output directory")
    add_config_arguments(parser, without=SET_BY_MEASURING)
    parser.set_defaults(run=_profile)


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="find the fastest setting for this machine",
        description=TUNE_HELP,
        epilog=TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    tune.add_argument(
        "--budget", type=seconds, default=300.0, metavar="SECONDS", help="time for the whole search; default: 300"
    )
    tune.add_argument(
        "--seconds", type=seconds, default=4.0, metavar="S", help="of each trial after its first update; default: 4"
    )
    tune.add_argument(
        "--exhaustive", action="store_true",
        help="afterwards measure every setting once, and the best of them in turns with the choice (takes long)",
    )  # fmt: skip
    tune.add_argument(
        "--allow-learning-changes", action="store_true", dest="learning_too",
        help="also try other numbers of environments and of A3C's workers, and other roundings of IMPALA's batch",
    )  # fmt: skip
    tune.add_argument("--overwrite", action="store_true", help="replace what an earlier search wrote")
    add_config_arguments(tune, without=SET_BY_MEASURING)
    tune.set_defaults(run=_tune)


def _tune(args: argparse.Namespace) -> int:
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


def _profile(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.profile.profile import ProfileSettings, profile

    if args.of is not None:
        from rl_cluster_benchmark.tools.profile.finished import explain

        return explain(args.of)
    if args.mode is None and args.config is None:
        args.mode = "parallel"
    settings = settings_from(ProfileSettings, args, output_dir=Path(args.output_dir or PROFILE_DIR))
    return profile(_config(args), settings, start_signals())
