"""`rlcb launch ssh`: a node on each machine of a hosts file, through the ssh that is installed."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.tools.launch import names
from rl_cluster_benchmark.tools.launch.command import TrainCommand
from rl_cluster_benchmark.tools.launch.launch_processes import RECEIVE, Lines, NodeProcess, SshProcess
from rl_cluster_benchmark.tools.launch.supervise import NO_OTHER_HEAD, supervise

SECONDS_TO_CONNECT = 10
FIRST_PORT, LAST_PORT, PORTS_APART = 1024, 65_535, 1009
WORKERS = re.compile("[1-9][0-9]{0,5}")
KEYS = {"addr": "its address for the other machines", "workers": "its worker processes"}


@dataclass(frozen=True)
class Host:
    name: str  # as ssh knows it: host, user@host, or a name in ~/.ssh/config
    address: str  # as the other machines know it
    workers: int | None = None


@dataclass(frozen=True)
class SshOptions:
    hosts: Sequence[Host]
    ssh: Sequence[str]  # the client and its options
    directory: str
    python: str
    activate: str | None  # a shell command that prepares the environment
    variables: Sequence[str]  # of the environment, to hand on: NAME or NAME=VALUE


class SshEngine:
    def __init__(self, command: TrainCommand, options: SshOptions) -> None:
        self.command, self.options = command, options
        self.hosts = list(options.hosts)

    def available(self, wanted: int) -> int:
        """Ask every machine; those that answer take part in the next attempt."""
        with ThreadPoolExecutor(max_workers=32) as pool:
            answers = list(pool.map(self._answers, self.options.hosts))
        if not answers[0] and not self.command.config.cluster.shared_filesystem:
            raise TrainingFailedError(NO_OTHER_HEAD.format(self.options.hosts[0].name))
        self.hosts = [host for host, answer in zip(self.options.hosts, answers, strict=True) if answer]
        return len(self.hosts)

    def start(self, num_nodes: int, attempt: int, lines: Lines) -> Sequence[NodeProcess]:
        cluster, hosts = self.command.config.cluster, self.hosts[:num_nodes]
        is_set = self.command.sets("--master-addr") and hosts[0] == self.options.hosts[0]
        address = cluster.master_addr if is_set else hosts[0].address
        port = port_of(cluster.master_port, attempt)
        nodes = []
        for rank, host in enumerate(hosts):
            call = self.command.for_node(rank, num_nodes=num_nodes, address=address, port=port)
            if host.workers is not None:
                call += ["--workers-per-node", str(host.workers)]
            nodes.append(start_through_ssh(self.options, host, call, lines, self.command.variables(attempt)))
        return nodes

    def _answers(self, host: Host) -> bool:
        try:
            call = [*self.options.ssh, host.name, "true"]
            return subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def launch(command: TrainCommand, options: SshOptions, signals: Signals) -> int:
    return supervise(SshEngine(command, options), command.config, len(options.hosts), signals)


def port_of(first: int, attempt: int) -> int:
    """Return another port for each attempt: the head of the last may still be there, and beside it other runs."""
    return first if attempt == 0 else FIRST_PORT + (first + attempt * PORTS_APART) % (LAST_PORT - FIRST_PORT + 1)


def start_through_ssh(
    options: SshOptions, host: Host, call: Sequence[str], lines: Lines, variables: Mapping[str, str] | None = None
) -> SshProcess:
    """Start the interpreter on that machine, with a terminal that ends it when the connection does.

    `variables` stand in its command line, where everybody on both machines can read them. The user's own variables do
    not: they follow over the connection.
    """
    public = {**(variables or {}), "RLCB_PROGRESS": "lines", "PYTHONUNBUFFERED": "1"}
    private = handed_on(options.variables)
    receiver = [options.python, "-c", RECEIVE] if private else []
    call = ["env", *(f"{name}={value}" for name, value in public.items()), *receiver, options.python, *call]
    dash = "./" if options.directory.startswith("-") else ""
    steps = [f"cd {shlex.quote(dash + options.directory)}"]
    if options.activate:
        steps.append(options.activate)
    steps.append(f"exec {shlex.join(call)}")
    return SshProcess(host.name, [*options.ssh, "-tt", host.name, " && ".join(steps)], lines, os.environ, private)


def handed_on(variables: Sequence[str]) -> dict[str, str]:
    """Return the variables that `--env` names, NAME or NAME=VALUE, as far as they are set."""
    given = {name: (equals, value) for name, equals, value in (variable.partition("=") for variable in variables)}
    return {
        name: value if equals else os.environ[name]
        for name, (equals, value) in given.items()
        if equals or name in os.environ
    }


def ssh_client(extra: Sequence[str]) -> list[str]:
    """Return a call of ssh that never asks a question and notices a dead connection within 15 seconds."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": SECONDS_TO_CONNECT,
        "ServerAliveInterval": 5,
        "ServerAliveCountMax": 3,
        "LogLevel": "ERROR",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    return ["ssh", *(word for option in extra for word in ("-o", option)), *options]


def read_hosts(text: str) -> list[Host]:
    """Read a file with a machine per line, or machines with commas between them. A machine named twice is one."""
    found: dict[str, Host] = {}
    for line in _host_lines(text):
        words = line.partition("#")[0].split()
        if words:
            found.setdefault(words[0], _host(words))
    if not found:
        raise UserError(f"{text} names no machine; write one per line, for example: node1 workers=16")
    return list(found.values())


def _host_lines(text: str) -> list[str]:
    try:
        return Path(text).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"The hosts file {text} is not text (UTF-8); write a machine per line.") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise UserError(f"The hosts file {text} cannot be read ({error.strerror}).") from None
    if "/" in text or text.endswith(".txt"):
        raise UserError(f"The hosts file {text} does not exist.")
    return text.split(",")


def _host(words: Sequence[str]) -> Host:
    if not names.is_host(words[0]):
        raise UserError(
            f"Host {words[0]!a} is not understood; a machine is name, user@name or an address, does not begin with -, "
            "and holds no quotes and other marks of a shell."
        )
    host = Host(words[0], words[0].rpartition("@")[2])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "addr" and names.is_host(value):
            host = replace(host, address=value)
        elif key == "workers" and WORKERS.fullmatch(value):
            host = replace(host, workers=int(value))
        else:
            known = ", ".join(f"{key}= ({meaning})" for key, meaning in KEYS.items())
            raise UserError(f"Host {words[0]}: {word!a} is not understood; known are {known}.")
    return host
