"""The command to launch: `train` and its arguments, as each node of each attempt gets them.

Every attempt gets the same arguments. The first one that begins a run leaves this launch's name in the run directory
(RunDirectory.begin_run); a later attempt finds it there and goes on from the last checkpoint, whatever --overwrite or
--resume say. An attempt that fails before that leaves nothing, and the next one does what was asked.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rl_cluster_benchmark.cluster import placement
from rl_cluster_benchmark.config.config_files import parse_assignment
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError

MODULE = ("-m", "rl_cluster_benchmark")
SET_BY_THE_LAUNCHER = {
    "cluster.num_workers": "leave it out, rlcb launch says how many machines take part",
    "cluster.master_addr": "write --master-addr",
    "cluster.master_port": "write --master-port",
}


@dataclass(frozen=True)
class TrainCommand:
    """What stands behind `--`, and the config it makes."""

    arguments: tuple[str, ...]  # of `rlcb train`
    config: Config
    job: str = field(default_factory=lambda: uuid.uuid4().hex)  # a name that no other launch will ever have

    @classmethod
    def parse(
        cls, words: Sequence[str], parse_train: Callable[..., tuple[argparse.Namespace, Config]],
        num_nodes: int | None = None,
    ) -> TrainCommand:  # fmt: skip
        """Read the words behind `rlcb launch ...`; `parse_train` makes arguments and config for so many machines."""
        words = list(words[1:] if words[:1] == ["--"] else words)
        if words[:1] != ["train"]:
            raise UserError(
                "Say what to launch behind --, for example: rlcb launch local --nodes 2 -- train --env coinrun"
            )
        arguments = [*words[1:]]
        if not _sets(arguments, "--mode") and not _sets(arguments, "--config"):
            arguments = ["--mode", "distributed", *arguments]
        args, config = parse_train(arguments, num_nodes)
        if num_nodes is not None:
            arguments += ["--num-nodes", str(num_nodes)]
        if args.node_rank is not None:
            raise UserError("Leave out --node-rank: rlcb launch numbers the machines.")
        if not config.is_distributed:
            raise UserError(f"rlcb launch is for --mode distributed, not {config.mode}.")
        for key in (parse_assignment(text)[0] for text in args.set):
            if key in SET_BY_THE_LAUNCHER:
                raise UserError(
                    f"--set {key} would hold for every attempt, whoever is left; {SET_BY_THE_LAUNCHER[key]}."
                )
        return cls(tuple(arguments), config)

    def sets(self, flag: str) -> bool:
        return _sets(self.arguments, flag)

    def for_node(self, rank: int, *, num_nodes: int, address: str, port: int) -> list[str]:
        """Return the whole call for one node, without the interpreter."""
        node = ["--num-nodes", num_nodes, "--node-rank", rank, "--master-addr", address, "--master-port", port]
        return [*MODULE, "train", *self.arguments, *map(str, node)]

    def variables(self, attempt: int) -> dict[str, str]:
        """Return what the nodes of an attempt find in their environment."""
        job = os.environ.get(placement.JOB_VARIABLE) or self.job  # a job script's name outlives this process
        return {placement.ATTEMPT_VARIABLE: str(attempt), placement.JOB_VARIABLE: job}


def _sets(arguments: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in arguments)


def interpreter(given: str | None) -> str:
    return given or sys.executable
