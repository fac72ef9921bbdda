"""`rlcb launch ssh`: a node on each machine of a hosts file, through the ssh that is installed."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rl_cluster_benchmark.cluster import placement
from rl_cluster_benchmark.cluster.launch.command import TrainCommand, interpreter
from rl_cluster_benchmark.cluster.launch.processes import Lines, NodeProcess, SshProcess
from rl_cluster_benchmark.cluster.launch.supervise import supervise
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.stop import Signals

SECONDS_TO_CONNECT = 10
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
        self.hosts = [host for host, answer in zip(self.options.hosts, answers, strict=True) if answer]
        return len(self.hosts)

    def start(self, num_nodes: int, attempt: int, lines: Lines) -> Sequence[NodeProcess]:
        cluster, hosts = self.command.config.cluster, self.hosts[:num_nodes]
        is_set = self.command.sets("--master-addr") and hosts[0] == self.options.hosts[0]
        address = cluster.master_addr if is_set else hosts[0].address
        nodes = []
        for rank, host in enumerate(hosts):
            call = self.command.for_node(
                rank, num_nodes=num_nodes, address=address, port=cluster.master_port + attempt, attempt=attempt
            )
            if host.workers is not None:
                call += ["--workers-per-node", str(host.workers)]
            variables = [f"{placement.ATTEMPT_VARIABLE}={attempt}"]
            nodes.append(SshProcess(host.name, through_ssh(self.options, host, call, variables), lines, os.environ))
        return nodes

    def _answers(self, host: Host) -> bool:
        try:
            call = [*self.options.ssh, host.name, "true"]
            return subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def launch(command: TrainCommand, options: SshOptions, signals: Signals) -> int:
    return supervise(SshEngine(command, options), command.config.cluster, len(options.hosts), signals)


def through_ssh(options: SshOptions, host: Host, call: Sequence[str], variables: Sequence[str] = ()) -> list[str]:
    """The interpreter on that machine, with a terminal that ends it when the connection does."""
    variables = [*variables, "RLCB_PROGRESS=lines", "PYTHONUNBUFFERED=1"]
    for variable in options.variables:
        name, equals, _ = variable.partition("=")
        if equals or name in os.environ:
            variables.append(variable if equals else f"{name}={os.environ[name]}")
    steps = [f"cd {shlex.quote(options.directory)}"]
    if options.activate:
        steps.append(options.activate)
    steps.append(f"exec {shlex.join(['env', *variables, options.python, *call])}")
    return [*options.ssh, "-tt", host.name, " && ".join(steps)]


def ssh_client(extra: Sequence[str]) -> list[str]:
    """Never a question; a dead connection is noticed within 15 seconds."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": SECONDS_TO_CONNECT,
        "ServerAliveInterval": 5,
        "ServerAliveCountMax": 3,
        "LogLevel": "ERROR",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    return ["ssh", *(word for option in extra for word in ("-o", option)), *options]


def options_from(
    hosts: str, *, python: str | None, directory: str | None, activate: str | None, variables: Sequence[str],
    ssh_options: Sequence[str],
) -> SshOptions:  # fmt: skip
    return SshOptions(
        read_hosts(hosts), ssh_client(ssh_options), directory or os.getcwd(), interpreter(python), activate, variables
    )


def read_hosts(text: str) -> list[Host]:
    """A file with a machine per line, or machines with commas between them. A machine named twice is one."""
    path = Path(text)
    if not path.is_file() and ("/" in text or text.endswith(".txt")):
        raise UserError(f"The hosts file {text} does not exist.")
    lines = path.read_text().splitlines() if path.is_file() else text.split(",")
    found: dict[str, Host] = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            found.setdefault(words[0], _host(words))
    if not found:
        raise UserError(f"{text} names no machine; write one per line, for example: node1 workers=16")
    return list(found.values())


def _host(words: Sequence[str]) -> Host:
    host = Host(words[0], words[0].rpartition("@")[2])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "addr" and value:
            host = replace(host, address=value)
        elif key == "workers" and value.isdigit() and int(value) > 0:
            host = replace(host, workers=int(value))
        else:
            known = ", ".join(f"{key}= ({meaning})" for key, meaning in KEYS.items())
            raise UserError(f"Host {words[0]}: {word} is not understood; known are {known}.")
    return host
