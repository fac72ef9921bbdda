"""`rlcb launch pbs`: a job script for qsub. In the job, the nodes of $PBS_NODEFILE are started through ssh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_cluster_benchmark.cluster.placement import JOB_VARIABLE
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.launch.command import MODULE, TrainCommand
from rl_cluster_benchmark.tools.launch.jobs import (
    PREEMPTED,
    JobOptions,
    ask,
    bash,
    clock,
    job_head,
    warning_before_the_end,
)

LONGEST = 230  # characters of a name
PLAIN = re.compile(rf"[\w.+@:/=,-]{{1,{LONGEST}}}")
TIME = re.compile(r"(?:(?:([0-9]{1,9}):)?([0-9]{1,9}):)?([0-9]{1,9})(?:\.[0-9]+)?")

RUN = """\
hosts={hosts}
script={script}
case ${{{job_variable}:-}} in  # by this name a job finds the run that it began, or that it was submitted again for
{job}-*) ;;
*) export {job_variable}={job}-$PBS_JOBID ;;
esac
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
        if grep -qs {job} "$script"; then
            qsub -v {variables} "$script"
        else
            echo "Not submitted again: $script is gone, or another job's."
        fi
    fi ;;
esac
exit "$status"
"""


WARN = """\
(  # a subshell that takes its sleep with it
    nap=
    trap 'kill "$nap" 2>/dev/null; exit' TERM
    sleep {seconds} &
    nap=$!
    wait "$nap" && kill -USR1 "$run"
) &
warning=$!
"""


class Pbs:
    submit_command = ("qsub",)

    def script(self, command: Sequence[str], options: JobOptions) -> str:
        return _head(options) + f"exec {bash([options.python, *MODULE, *command])}\n"

    def distributed_script(
        self, command: TrainCommand, options: JobOptions, *, script_file: Path, hosts_file: str | None,
        ssh_arguments: Sequence[str],
    ) -> str:  # fmt: skip
        launch = [options.python, *MODULE, "launch", "ssh"]
        launch += [f"--python={options.python}", f"--directory={options.directory}", *ssh_arguments]
        launch += [f"--activate={options.activate}"] if options.activate else []
        call = f'{bash(launch)} --hosts="$hosts" -- {bash(["train", *command.arguments])}'
        limit = self.seconds(options.time_limit) if options.time_limit is not None else 0
        warning = limit - warning_before_the_end(limit, options)
        body = RUN.format(
            hosts=bash([hosts_file]) if hosts_file else '"${PBS_NODEFILE:?is not set: is this a PBS job?}"',
            launch=call,
            job=command.job,
            job_variable=JOB_VARIABLE,
            variables=",".join([JOB_VARIABLE, *_variables(options.directives)]),
            warn=WARN.format(seconds=warning) if warning > 0 else "",
            unwarn='kill "$warning" 2>/dev/null\n' if warning > 0 else "",
            preempted=" | ".join(map(str, PREEMPTED)),
            script=bash([str(script_file.resolve())]),
        )
        return _head(options) + body

    def seconds(self, time_limit: str) -> int:
        """Read [[hours:]minutes:]seconds[.milliseconds]."""
        match = TIME.fullmatch(time_limit)
        if match is None:
            raise UserError(f"--time {time_limit} is not understood; PBS writes it as HH:MM:SS, MM:SS or seconds.")
        hours, minutes, rest = (int(part or 0) for part in match.groups())
        total = hours * 3600 + minutes * 60 + rest
        if total == 0:
            raise UserError(f"--time {time_limit} is no time; leave --time out for the queue's limit.")
        return total

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
        return _log(options)


def _variables(directives: Sequence[str]) -> list[str]:
    """Return the names of the variables that -v directives hand on: a -v on qsub's command line replaces theirs."""
    lists = [words[1:] for line in directives if (words := line.split()) and words[0] == "-v"]
    return [pair.partition("=")[0] for words in lists for word in words for pair in word.split(",") if pair]


def _log(options: JobOptions) -> Path:
    return Path(options.directory, options.log or "rlcb.out")


def _head(options: JobOptions) -> str:
    for what, value in {
        "--job-name": options.name, "--queue": options.partition, "--account": options.account,
        "--memory": options.memory,
    }.items():  # fmt: skip
        if value is not None and not PLAIN.fullmatch(value):
            raise UserError(
                f"{what} {value!a} is not allowed: PBS takes letters, digits and . _ + - @ : / = , at most {LONGEST}."
            )
    chunk = f"select={options.nodes}"
    if options.cpus_per_node is not None:
        chunk += f":ncpus={options.cpus_per_node}"
    if options.memory is not None:
        chunk += f":mem={options.memory}"
    directives = [f"-N {options.name}", f"-l {chunk}", "-l place=scatter", "-j oe"]
    if options.time_limit is not None:
        directives.append(f"-l walltime={clock(Pbs().seconds(options.time_limit))}")
    optional = {"-q": options.partition, "-A": options.account}
    directives += [f"{flag} {value}" for flag, value in optional.items() if value is not None]
    directives += ["-r y", *options.directives]
    # PBS brings its own file when the job ends, and a job submitted again replaces it: so the job writes to a log.
    return job_head("#PBS", directives, options, _log(options))
