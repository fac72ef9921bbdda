"""The command to launch: `train` and its arguments, as each node of each attempt gets them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.errors import UserError

MODULE = ("-m", "rl_cluster_benchmark")
ONLY_THE_FIRST_TIME = ("--overwrite", "--resume")


@dataclass(frozen=True)
class TrainCommand:
    """What stands behind `--`, and the config it makes."""

    arguments: tuple[str, ...]  # of `rlcb train`
    config: Config

    @classmethod
    def parse(cls, words: Sequence[str], *, num_nodes: int | None = None) -> TrainCommand:
        from rl_cluster_benchmark import cli

        words = list(words[1:] if words[:1] == ["--"] else words)
        if words[:1] != ["train"]:
            raise UserError(
                "Say what to launch behind --, for example: rlcb launch local --nodes 2 -- train --env coinrun"
            )
        if "--node-rank" in words:
            raise UserError("Leave out --node-rank: rlcb launch numbers the machines.")
        arguments = [*words[1:]]
        if "--mode" not in arguments and "--config" not in arguments:
            arguments = ["--mode", "distributed", *arguments]
        if num_nodes is not None:
            arguments += ["--num-nodes", str(num_nodes)]
        config = cli.config_from(cli.build_parser().parse_args(["train", *arguments]))
        if config.mode != "distributed":
            raise UserError(f"rlcb launch is for --mode distributed, not {config.mode}.")
        return cls(tuple(arguments), config)

    def sets(self, flag: str) -> bool:
        return any(word == flag or word.startswith(f"{flag}=") for word in self.arguments)

    def for_node(self, rank: int, *, num_nodes: int, address: str, port: int, attempt: int) -> list[str]:
        """The whole call for one node, without the interpreter; later attempts go on from the last checkpoint."""
        node = ["--num-nodes", num_nodes, "--node-rank", rank, "--master-addr", address, "--master-port", port]
        return [*MODULE, "train", *self.for_attempt(attempt), *map(str, node)]

    def for_attempt(self, attempt: int) -> list[str]:
        first = [self.first_time] if self.first_time else []
        return [*self.lasting, *(first if attempt == 0 else ["--resume"])]

    @property
    def lasting(self) -> list[str]:
        """The arguments of every attempt."""
        return [word for word in self.arguments if word not in ONLY_THE_FIRST_TIME]

    @property
    def first_time(self) -> str:
        """What the first attempt has in place of the later ones' --resume; may be empty."""
        return next((word for word in self.arguments if word in ONLY_THE_FIRST_TIME), "")


def interpreter(given: str | None) -> str:
    return given or sys.executable
