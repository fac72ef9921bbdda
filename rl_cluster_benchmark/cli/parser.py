"""Builds the parser of `rlcb` from commands.toml.

A table there is a subcommand: its texts, and `run`, the function that it calls ("module:function" in this folder). The
tables inside it are its arguments, with what argparse's add_argument takes; `type` is a name in values.py, `exclusive`
stands at arguments that exclude each other, `group` is their heading. CONFIG stands for the arguments that are keys of
a config, other names in capitals for a table of arguments that several commands share.
"""

from __future__ import annotations

import argparse
import importlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.cli.arguments import add_config_arguments
from rl_cluster_benchmark.cli.values import TYPES

COMMANDS = Path(__file__).with_name("commands.toml")


def build_parser() -> argparse.ArgumentParser:
    tables = tomllib.loads(COMMANDS.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser("rlcb", **_texts(tables["rlcb"]))
    parser.add_argument("--version", action="version", version=f"rlcb {__version__}")
    commands = {"": parser.add_subparsers(title="commands", metavar="COMMAND", required=True)}
    for name, table in tables.items():
        if name.isupper() or name == "rlcb":
            continue
        above, _, own = name.rpartition(" ")
        command = commands[above].add_parser(own, help=table["help"], **_texts(table))
        if "subcommands" in table:
            title, metavar = table["subcommands"]
            commands[name] = command.add_subparsers(title=title, metavar=metavar, required=True)
        _add_arguments(command, table, tables)
        if "run" in table:
            command.set_defaults(command=table["run"], **table.get("defaults", {}))
    return parser


def command_of(args: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """Return the function that the subcommand on this command line calls; its module is imported only now."""
    module, _, function = args.command.partition(":")
    return getattr(importlib.import_module(f"rl_cluster_benchmark.cli.{module}"), function)


def _texts(table: dict[str, Any]) -> dict[str, Any]:
    texts = {"description": table["description"], "allow_abbrev": table.get("abbreviations", True)}
    if "epilog" in table:
        texts |= {"epilog": table["epilog"], "formatter_class": argparse.RawDescriptionHelpFormatter}
    return texts


def _add_arguments(command: argparse.ArgumentParser, table: dict[str, Any], tables: dict[str, Any]) -> None:
    groups: dict[object, Any] = {None: command}
    for name, argument in _arguments(table, tables):
        if name == "CONFIG":
            add_config_arguments(command, **argument)
            continue
        options = dict(argument)
        if "type" in options:
            options["type"] = TYPES[options["type"]]
        if options.pop("hidden", False):
            options["help"] = argparse.SUPPRESS
        heading, exclusive = options.pop("group", None), options.pop("exclusive", False)
        if heading not in groups:
            groups[heading] = command.add_argument_group(heading)
        if exclusive and "exclusive" not in groups:
            groups["exclusive"] = command.add_mutually_exclusive_group()
        groups["exclusive" if exclusive else heading].add_argument(name, **options)


def _arguments(table: dict[str, Any], tables: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the arguments of a command in their order, with those that it shares with others in their place."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, argument in table.items():
        if name in tables and name.isupper():
            found += [(each, options | argument) for each, options in tables[name].items()]
        elif isinstance(argument, dict) and name != "defaults":
            found.append((name, argument))
    return found
