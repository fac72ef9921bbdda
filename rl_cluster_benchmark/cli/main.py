"""The `rlcb` command: commands.toml lists the subcommands, their arguments, and the function that each of them calls.

Nothing heavy is imported until a subcommand needs it: `rlcb --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_cluster_benchmark.cli.arguments import config_from
from rl_cluster_benchmark.cli.parser import build_parser, command_of
from rl_cluster_benchmark.core import inherited
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError

if TYPE_CHECKING:
    from rl_cluster_benchmark.config.schema import Config


def main(argv: Sequence[str] | None = None) -> int:
    inherited.put_in_order()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    args = build_parser().parse_args(argv)
    args.parse_train = parse_train
    try:
        inherited.check_directory()
        status = command_of(args)(args)
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
