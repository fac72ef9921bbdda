"""`rlcb launch pbs`: a job script for qsub. In the job, the nodes of $PBS_NODEFILE are started through ssh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_cluster_benchmark.cluster.launch.command import MODULE, TrainCommand
from rl_cluster_benchmark.cluster.launch.jobs import PREEMPTED, JobOptions, ask, bash, seconds
from rl_cluster_benchmark.errors import UserError

RUN = """\
hosts={hosts}
resume={first}
[ -n "${{RLCB_RESUME:-}}" ] && resume=--resume
cancelled=0
trap 'cancelled=1; kill -TERM "$run"' TERM  # qdel
trap 'kill -USR1 "$run"' USR1
{launch} &
run=$!
{warn}status=
while [ -z "$status" ]; do  # a trap ends wait before the run has ended
    wait "$run"
    code=$?
    kill -0 "$run" 2>/dev/null || status=$code
done
{unwarn}case $status in
{preempted})
    if [ "$cancelled" -eq 0 ]; then
        echo "Preempted: submitted again, to go on from the checkpoint."
        qsub -v RLCB_RESUME=1 {script}
    fi ;;
esac
exit "$status"
"""


class Pbs:
    submit_command = ("qsub",)

    def script(self, command: Sequence[str], options: JobOptions) -> str:
        return _head(options) + f"exec {bash([options.python, *MODULE, *command])}\n"

    def distributed_script(
        self, command: TrainCommand, options: JobOptions, *, script_file: Path, hosts_file: str | None,
        ssh_arguments: Sequence[str],
    ) -> str:  # fmt: skip
        launch = [
            options.python,
            *MODULE,
            "launch",
            "ssh",
            "--python",
            options.python,
            "--directory",
            options.directory,
        ]
        launch += [*ssh_arguments, *(["--activate", options.activate] if options.activate else [])]
        call = f'{bash(launch)} --hosts "$hosts" -- {bash(["train", *command.lasting])} $resume'
        warning = seconds(options.time_limit) - options.warning_seconds if options.time_limit else 0
        body = RUN.format(
            hosts=bash([hosts_file]) if hosts_file else '"${PBS_NODEFILE:?is not set: is this a PBS job?}"',
            launch=call,
            first=command.first_time,
            warn=f'( sleep {warning} && kill -USR1 "$run" ) &\nwarning=$!\n' if warning > 0 else "",
            unwarn='kill "$warning" 2>/dev/null\n' if warning > 0 else "",
            preempted=" | ".join(map(str, PREEMPTED)),
            script=bash([str(script_file.resolve())]),
        )
        return _head(options) + body

    def state(self, job: str) -> str | None:
        done = ask(["qstat", "-f", job])
        match = re.search(r"job_state = (\w)", done.stdout)
        return match.group(1) if match and match.group(1) not in "CFX" else None

    def status(self, job: str) -> int | None:
        for call in (["qstat", "-x", "-f", job], ["qstat", "-f", job]):
            match = re.search(r"exit_status = (\d+)", ask(call).stdout, re.IGNORECASE)
            if match:
                return int(match.group(1))
        return None

    def log_file(self, job: str, options: JobOptions) -> Path:
        return Path(options.directory, options.log or "rlcb.out")

    def cancel(self, job: str) -> None:
        ask(["qdel", job])


def _head(options: JobOptions) -> str:
    chunk = f"select={options.nodes}"
    if options.cpus_per_node is not None:
        chunk += f":ncpus={options.cpus_per_node}"
    if options.memory is not None:
        chunk += f":mem={options.memory}"
    directives = [f"-N {options.name}", f"-l {chunk}", "-l place=scatter", f"-o {options.log or 'rlcb.out'}", "-j oe"]
    if options.time_limit is not None:
        if "-" in options.time_limit:
            raise UserError(f"--time {options.time_limit}: PBS writes it as HH:MM:SS.")
        directives.append(f"-l walltime={options.time_limit}")
    optional = {"-q": options.partition, "-A": options.account}
    directives += [f"{flag} {value}" for flag, value in optional.items() if value is not None]
    directives += ["-r y", *options.directives]
    lines = ["#!/bin/bash", *(f"#PBS {directive}" for directive in directives), ""]
    lines += [f"cd {bash([options.directory])} || exit 2", "export PYTHONUNBUFFERED=1 RLCB_PROGRESS=lines"]
    if options.activate:
        lines.append(f"{options.activate} || exit 2")
    return "\n".join(lines) + "\n"
