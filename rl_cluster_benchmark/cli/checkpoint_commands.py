"""`rlcb checkpoint`: its arguments, and the function that each of them calls."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_checkpoint_command(commands: Any) -> None:
    checkpoint = commands.add_parser(
        "checkpoint",
        help="look into checkpoints: inspect, verify",
        description="Look into checkpoints. Reading one runs no code that may be in it.",
    )
    actions = checkpoint.add_subparsers(title="actions", metavar="ACTION", required=True)
    inspect = actions.add_parser("inspect", help="what is in a checkpoint", description="Say what is in a checkpoint.")
    inspect.add_argument("file", type=Path, metavar="FILE", help="a checkpoint")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    inspect.set_defaults(run=_inspect)
    verify = actions.add_parser(
        "verify",
        help="check that checkpoints are whole",
        description="Check checksum, format and content of checkpoints; status 1 if one of them is not good.",
    )
    verify.add_argument(
        "paths", type=Path, metavar="PATH", nargs="+", help="checkpoints, or directories that hold some"
    )
    verify.set_defaults(run=_verify)


def _inspect(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.inspection import inspect

    return inspect(args.file, as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.inspection import verify

    return verify(args.paths)
