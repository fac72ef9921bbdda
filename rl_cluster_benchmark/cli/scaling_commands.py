"""The subcommand `rlcb scaling`: a sweep over workers, or with --project a projection to many machines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.cli.arguments import (
    add_config_arguments,
    config_from,
    number,
    numbers,
    positive,
    seconds,
    settings_from,
    start_signals,
)
from rl_cluster_benchmark.config.traits import TRAITS
from rl_cluster_benchmark.core.errors import UserError

MOST = 1e12  # of any unit of bandwidth or time
PROJECTION_DIR = "runs/projection"
SCALING_DIR = "runs/scaling"

SET_BY_SCALING = (
    "--mode", "--total-timesteps", "--duration", "--num-workers", "--num-envs-per-worker", "--checkpoint-dir",
    "--log-dir", "--num-nodes", "--workers-per-node", "--master-addr", "--master-port",
)  # fmt: skip
DESCRIPTION = """\
Measure how training speeds up with the workers of this machine: train with 1, 2, 4, ... workers for a while each, and
beside each with as many independent runs that do the same work without communication. So you see what the machine
costs and what this program costs.

With --project: how fast would it be on many machines like this one? Trains on this machine alone for a while, measures
what Gloo itself takes, and projects steps per second and efficiency for every way to keep machines together."""
EXAMPLES = """\
how to read a projection:
  An update takes the work of one machine, the wait for the slowest of all, and the sums over the network.
  work           measured here: the rollout, and each minibatch
  waiting        grows slowly with machines: the expected slowest of n, from how much updates vary (--spread adds how
                 much machines differ)
  communication  Gloo's ring: 2 (n - 1) hops for each sum. Many machines pay for latency, large gradients for bandwidth
  Efficiency is work / (work + waiting + communication). Every machine keeps its share of a minibatch, so the global
  minibatch grows with the machines: what is projected is speed, not learning.

examples:
  rlcb scaling --workers 1,2,4,8,16 --config ppo_procgen_paper --repeats 3
  rlcb scaling --project                                            # three typical networks
  rlcb scaling --project --bandwidth 25gbit --round-trip 30us --batch-size 16384
  rlcb doctor --cluster --hosts hosts.txt --json net.json && rlcb scaling --project --network net.json
  rlcb scaling --project --measured runs/projection/projection.json --bandwidth 1gbit --round-trip 1ms --overwrite
"""
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def add_scaling_command(commands: Any) -> None:
    scaling = commands.add_parser(
        "scaling",
        help="measure how training speeds up with workers, project how it would with machines",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config_arguments(scaling, without=SET_BY_SCALING)
    scaling.add_argument(
        "--workers", type=numbers, metavar="N,N,...",
        help="numbers of workers; default: powers of two up to the usable cores",
    )  # fmt: skip
    scaling.add_argument(
        "--envs-per-worker", type=positive, metavar="N",
        help="weak scaling: N environments for each worker; default: strong scaling, the same total for all",
    )  # fmt: skip
    scaling.add_argument(
        "--seconds", type=seconds, default=60.0, metavar="S", help="of each run after its first update; default: 60"
    )
    scaling.add_argument(
        "--repeats", type=positive, default=1, metavar="N", help="rounds, medians are reported; default: 1"
    )
    scaling.add_argument("--overwrite", action="store_true", help="replace the results in the output directory")
    _add_projection_arguments(scaling)
    scaling.set_defaults(run=_scaling, mode="parallel")


def _add_projection_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --project")
    group.add_argument("--project", action="store_true", help="project to many machines instead of sweeping workers")
    group.add_argument(
        "--nodes", type=_nodes, metavar="N,N,...", help="numbers of machines; default: 1,2,4,...,512,1000"
    )
    group.add_argument(
        "--network", type=Path, metavar="FILE", help="the network that rlcb doctor --cluster --json has measured"
    )
    group.add_argument("--bandwidth", type=_rate, metavar="RATE", help="of every link: 10gbit, 100mbit")
    group.add_argument("--round-trip", type=_time, metavar="TIME", help="between two machines: 0.1ms, 50us")
    group.add_argument(
        "--spread", type=number(lambda share: 0 <= share < 1, "a number from 0 to 1, 0.03 is 3%"), metavar="SHARE",
        help="standard deviation of the machines' speeds, 0.03 is 3%%; default: from --network, else 0",
    )  # fmt: skip
    group.add_argument("--measured", type=Path, metavar="FILE", help="an earlier projection.json: measure nothing anew")


def _nodes(text: str) -> list[int]:
    numbers = text.replace(" ", "").split(",")
    if not all(number.isdecimal() and len(number) < 8 and 1 <= int(number) <= 1_000_000 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not allowed; write numbers of machines as 1,2,4")
    return sorted({1, *map(int, numbers)})


def _rate(text: str) -> float:
    return _with_unit(text, UNITS, "10gbit, 100mbit")


def _time(text: str) -> float:
    return _with_unit(text, TIMES, "0.1ms, 50us")


def _with_unit(text: str, units: Mapping[str, float], examples: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.lower())
    if match is None or match.group(2) not in units or not 0 < float(match.group(1)) <= MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not understood; write it as {examples}")
    return float(match.group(1)) * units[match.group(2)]


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


def _scaling(args: argparse.Namespace) -> int:
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
