"""The `rlcb` command. Each subcommand reads its arguments and calls one function of the package.

Nothing heavy is imported until a subcommand needs it: `rlcb --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.cli import checkup_commands as checkup_arguments
from rl_cluster_benchmark.cli import launch_commands as launch_arguments
from rl_cluster_benchmark.cli.analysis_commands import add_analysis_commands, add_checkpoint_command
from rl_cluster_benchmark.cli.arguments import (
    add_config_arguments,
    config_from,
    finite,
    positive,
    rank,
    seed,
    settings_from,
    start_signals,
    without_effect,
)
from rl_cluster_benchmark.cli.performance_commands import add_performance_commands
from rl_cluster_benchmark.cli.scaling_commands import add_scaling_command
from rl_cluster_benchmark.cli.search_commands import add_search_command
from rl_cluster_benchmark.core import inherited
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError

if TYPE_CHECKING:
    from rl_cluster_benchmark.config.schema import Config
    from rl_cluster_benchmark.core.stop import Signals

DESCRIPTION = "Train, evaluate and compare PPO, A2C, A3C and IMPALA on Procgen, on CPUs."
EXAMPLES = """\
examples:
  rlcb train --env coinrun --total-timesteps 1000000 --output-dir runs/coinrun
  rlcb train --resume --output-dir runs/coinrun
  rlcb train --algorithm impala --mode parallel --set impala.num_actors=auto --output-dir runs/impala
  rlcb launch local --nodes 2 -- train --config impala_cpu_cluster --output-dir runs/two-machines
  rlcb evaluate --checkpoint runs/coinrun/checkpoints/ppo_sequential_final.pt --levels test
  rlcb plot --log-file runs/coinrun/logs/PPO_Sequential/metrics.jsonl
  rlcb scaling --algorithm ppo --workers 1,2,4,8,16
  rlcb tune --config ppo_procgen_paper
  rlcb search --space ppo_procgen --trials 60 --output-dir runs/search
  rlcb scaling --project --bandwidth 10gbit --round-trip 0.1ms
  rlcb compare runs/coinrun runs/starpilot
  rlcb benchmark --algorithms ppo a2c --games coinrun --seeds 1 2 3 --duration 0.5
  rlcb doctor
"""

QUICKSTART_DIR = "runs/quickstart"


def main(argv: Sequence[str] | None = None) -> int:
    inherited.put_in_order()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    args = build_parser().parse_args(argv)
    args.parse_train = parse_train
    try:
        inherited.check_directory()
        status = args.run(args)
        sys.stdout.flush()
        return status
    except (UserError, TrainingFailedError) as error:
        print(f"error: {_shown(error)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except BrokenPipeError:  # the reader of our output went away: `rlcb config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"error: {_shown(error)}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what it holds cannot be written at the end
        return 1
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        print("error: A path holds a NUL byte, which no file name can.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _shown(error: Exception) -> str:
    """Return its sentence without control characters that could drive a terminal: names of files may hold them."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(error))


def parse_train(arguments: Sequence[str], num_nodes: int | None = None) -> tuple[argparse.Namespace, Config]:
    """Read what stands behind `rlcb train`, for commands that start training, maybe on so many machines."""
    args = build_parser().parse_args(["train", *arguments])
    if num_nodes is not None:
        for given in (args.num_workers, args.num_nodes):
            if given is not None and str(given) != str(num_nodes):
                raise UserError(
                    f"{given} machines behind -- are not the {num_nodes} that rlcb launch starts; leave it out. "
                    "How many workers each machine has is said with --workers-per-node."
                )
        args.num_nodes = str(num_nodes)
    return args, config_from(args)


def build_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("rlcb", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"rlcb {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train an agent", description="Train an agent.", allow_abbrev=False)
    add_config_arguments(train)
    train.add_argument("--default-config", help=argparse.SUPPRESS)  # of the scripts, whose defaults are documented
    train.add_argument(
        "--node-rank", type=rank, metavar="N", help="number of this machine, the head is 0 (distributed mode); "
        "default: from torchrun or SLURM, else the head is whoever has --master-addr, the others count as they come",
    )  # fmt: skip
    group = train.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true", help="go on with the run in the output directory")
    group.add_argument(
        "--resume-if-present", action="store_true", help="go on with the run there; start one where there is none"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the run in the output directory")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate",
        help="play episodes with a trained agent",
        description="Play whole episodes with a trained agent. Algorithm, network and game come from the checkpoint.",
        allow_abbrev=False,
    )
    add_evaluation_arguments(evaluate)
    evaluate.set_defaults(run=_evaluate)

    plot = commands.add_parser("plot", help="draw the curves of a run", description="Draw the curves of a run as PNG.")
    plot.add_argument("--log-file", required=True, metavar="FILE", help="a run's metrics.jsonl")
    plot.add_argument("--output", metavar="PNG", help="default: metrics.png beside the log file")
    plot.set_defaults(run=_plot)

    add_scaling_command(commands)
    add_analysis_commands(commands)
    add_checkpoint_command(commands)
    add_performance_commands(commands)
    add_search_command(commands)

    doctor = commands.add_parser(
        "doctor",
        help="check that everything needed is there, here or (--cluster) on several machines",
        description="Check this machine; with --cluster, several machines and the network between them.",
        allow_abbrev=False,
    )
    checkup_arguments.add_arguments(doctor)
    doctor.set_defaults(run=_doctor)

    config = commands.add_parser(
        "config",
        help="print the complete config of a command line",
        description="Print the complete config that `rlcb train` with the same arguments would run with.",
        allow_abbrev=False,
    )
    add_config_arguments(config)
    config.add_argument("--markdown", action="store_true", help="print the configuration reference instead")
    config.add_argument("--presets", action="store_true", help="list the presets for --config instead")
    config.set_defaults(run=_config)

    launch_arguments.add_parser(commands)

    quickstart = commands.add_parser(
        "quickstart",
        help="train for a minute, evaluate, plot: a first look",
        description="Train PPO on CoinRun for about a minute, evaluate it on levels seen and unseen, draw the curve.",
    )
    quickstart.add_argument("--output-dir", default=QUICKSTART_DIR, metavar="DIR", help=f"default: {QUICKSTART_DIR}")
    quickstart.add_argument("--overwrite", action="store_true", help="replace the run in the output directory")
    quickstart.add_argument("--duration", type=finite, default=1 / 60, metavar="HOURS", help="default: a minute")
    quickstart.set_defaults(run=_quickstart)
    return parser


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="default: the newest in ./checkpoints, ./runs and ./benchmarks"
    )
    parser.add_argument(
        "--algorithm", type=str.lower, metavar="NAME",
        help="take the newest checkpoint of this algorithm; with --checkpoint: check that it is of this algorithm",
    )  # fmt: skip
    parser.add_argument("--env", metavar="GAME", help="another game than the agent was trained on")
    parser.add_argument("--num-episodes", type=positive, default=100, metavar="N", help="default: 100")
    parser.add_argument("--deterministic", action="store_true", help="take the likeliest action instead of sampling")
    parser.add_argument(
        "--random", action="store_true", help="play at random in the agent's place: what it has to be better than"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of levels and actions; default: 0")
    parser.add_argument(
        "--levels", choices=("train", "test", "all"), default="test",
        help="levels of training, levels never trained on (default), or all levels (the published test)",
    )  # fmt: skip
    parser.add_argument(
        "--num-threads", type=positive, metavar="N", help="threads to use; default: one per physical core"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument(
        "--video", type=Path, metavar="FILE", help="record episodes side by side: .gif, .mp4, or a short .webp"
    )
    parser.add_argument("--render", action="store_true", help="watch in a window (needs a display)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the config: --set env.num_levels=500"
    )


def _train(args: argparse.Namespace) -> int:
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


def _evaluate(args: argparse.Namespace) -> int:
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


def _plot(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.reports.plots import plot_metrics

    print(f"Saved {plot_metrics(args.log_file, args.output)}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.cluster or args.hosts is not None:
        return checkup_arguments.run(args)
    from rl_cluster_benchmark.tools.doctor import doctor

    return doctor()


def _config(args: argparse.Namespace) -> int:
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


def _quickstart(args: argparse.Namespace) -> int:
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
