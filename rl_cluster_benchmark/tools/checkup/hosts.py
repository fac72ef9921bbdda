"""The machines of a hosts file, from outside: does ssh get in, is the program there, what do they measure?"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rl_cluster_benchmark.tools.checkup.probe import Measurements
from rl_cluster_benchmark.tools.launch.command import MODULE
from rl_cluster_benchmark.tools.launch.launch_processes import Lines, LocalProcess, take_lines
from rl_cluster_benchmark.tools.launch.ssh import Host, SshOptions, start_through_ssh

MARK = "RLCB-DOCTOR "  # in front of what a machine answers, whatever else its shell prints
PROGRAM = "rl_cluster_benchmark"
SECONDS_TO_ANSWER = 60
SECONDS_BETWEEN_LOOKS = 0.1
NO_CONNECTION, NOT_FOUND = 255, 127  # statuses of ssh and of the shell there
# Needs nothing of the program, so that it can say that the program is missing, or is another version.
QUESTION = f"""
import json, platform
answer = {{"versions": {{"python": platform.python_version()}}}}
try:
    import rl_cluster_benchmark
    from rl_cluster_benchmark.machine import detection
    from rl_cluster_benchmark.run.provenance import git_commit, package_versions
    answer["versions"] |= {{
        "rl_cluster_benchmark": rl_cluster_benchmark.__version__, "source": git_commit(), **package_versions()
    }}
    answer["usable_cores"] = detection.detect().usable_cores
except Exception as error:
    answer["error"] = f"{{type(error).__name__}}: {{error}}"
print("{MARK}" + json.dumps(answer))
"""


@dataclass(frozen=True)
class Answer:
    """What a machine answered that was asked through ssh."""

    host: Host
    trouble: str = ""  # why there is no answer, or no program
    remedy: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    usable_cores: int = 0

    @property
    def is_ready(self) -> bool:
        return not self.trouble


def ask_all(options: SshOptions) -> list[Answer]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(lambda host: _ask(options, host), options.hosts))


def able_to_meet(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers of machines that have the program in the head's version: another may not know how."""
    ready = [answer for answer in answers if answer.is_ready]
    return [answer for answer in ready if answer.versions.get(PROGRAM) == ready[0].versions.get(PROGRAM)]


def _ask(options: SshOptions, host: Host) -> Answer:
    lines: Lines = queue.SimpleQueue()
    try:
        process = start_through_ssh(options, host, ["-c", QUESTION], lines)
    except FileNotFoundError:
        return Answer(host, "there is no ssh on this machine", "install an ssh client")
    (status,), output = _wait([process], lines, SECONDS_TO_ANSWER)
    if status is None:
        return Answer(host, f"ssh gave no answer within {SECONDS_TO_ANSWER} s", "is the machine overloaded, or hung?")
    return understand(host, status, "\n".join(output[host.name]), options)


def _wait(nodes: Sequence[LocalProcess], lines: Lines, seconds: float) -> tuple[list[int | None], dict[str, list[str]]]:
    """Wait for the end of all, and kill those that take longer; return each one's status (None: killed) and output."""
    deadline = time.monotonic() + seconds
    while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    statuses = [node.poll() for node in nodes]
    for node in nodes:
        node.kill()
        node.close()
    output: dict[str, list[str]] = {node.name: [] for node in nodes}
    for name, line in take_lines(lines):
        output[name].append(line)
    return statuses, output


def understand(host: Host, status: int, output: str, options: SshOptions) -> Answer:
    """Return what a machine's words, or its silence, mean."""
    answer = marked(output)
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no word")
    if answer is None and status == NO_CONNECTION:
        return Answer(host, f"cannot be reached: {last}", f"make `ssh {host.name}` work without a question")
    if answer is None and status == NOT_FOUND:
        return Answer(host, f"has no {options.python}: {last}", "install it at the same place, or give --python")
    if answer is None:
        return Answer(host, f"did not answer (status {status}): {last}", "check --directory, --activate and --python")
    if "error" in answer:
        remedy = "install the same version there, or hand on --env PYTHONPATH, --directory or --activate"
        return Answer(host, f"cannot load the program: {answer['error']}", remedy, answer["versions"])
    return Answer(host, versions=answer["versions"], usable_cores=answer["usable_cores"])


def marked(output: str) -> dict[str, Any] | None:
    for line in output.splitlines():
        if line.startswith(MARK):
            return dict(json.loads(line.removeprefix(MARK)))
    return None


def measure_through_ssh(
    options: SshOptions, hosts: Sequence[Host], arguments: Sequence[str], seconds: float
) -> tuple[Measurements | None, dict[str, str]]:
    """Return what these machines measure together, and the errors of those that failed."""

    def start(rank: int, call: Sequence[str], lines: Lines) -> LocalProcess:
        return start_through_ssh(options, hosts[rank], call, lines)

    return measure_together(start, len(hosts), ["--master-addr", hosts[0].address, *arguments], seconds)


def measure_together(
    start: Callable[[int, Sequence[str], Lines], LocalProcess], nodes: int, arguments: Sequence[str], seconds: float
) -> tuple[Measurements | None, dict[str, str]]:
    """Return what the nodes that `start` starts measure together, and the errors of those that failed.

    `arguments` are those of `rlcb doctor --cluster` that all of them get.
    """
    lines: Lines = queue.SimpleQueue()
    started = []
    for rank in range(nodes):
        where = ["--node-rank", str(rank), "--num-nodes", str(nodes), *arguments]
        started.append(start(rank, [*MODULE, "doctor", "--cluster", *where, "--json", "-"], lines))
    statuses, output = _wait(started, lines, seconds)
    errors = {}
    for node, status in zip(started, statuses, strict=True):
        said = output[node.name]
        wrong = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        if wrong:
            errors[node.name] = wrong[0]
        elif status is None:
            errors[node.name] = f"did not finish within {seconds:.0f} s"
        elif status != 0:
            errors[node.name] = said[-1] if said else "no word"
    found = marked("\n".join(output[started[0].name]))
    return (Measurements.from_dict(found) if found else None), errors
