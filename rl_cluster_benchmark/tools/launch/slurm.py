"""`rlcb launch slurm`: a job script for sbatch, one task per node; a preempted run puts itself back into the queue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_cluster_benchmark.cluster.placement import JOB_VARIABLE
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.launch.command import MODULE, TrainCommand
from rl_cluster_benchmark.tools.launch.jobs import (
    FINAL,
    PREEMPTED,
    WRONG_INPUT,
    JobOptions,
    ask,
    bash,
    clock,
    job_head,
    warning_before_the_end,
)

LOG = "rlcb-%j.out"
TIME_PART = re.compile(r"[0-9]{1,9}")
FIRST_PORT, PORTS = 20_000, 20_000  # of the rendezvous, one per job
UNFINISHED = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "STOPPED"}

RUN = """\
# {note}
cancelled=0
trap 'cancelled=1' TERM  # scancel reaches this shell too; a preemption reaches the tasks alone
status=1
for attempt in $(seq 0 {max_restarts}); do
    {task}
    status=$?
    [ "$cancelled" -eq 1 ] && exit "$status"
    case $status in
    {final}) exit "$status" ;;
    {wrong}) [ "$attempt-${{SLURM_RESTART_COUNT:-0}}" = 0-0 ] && exit "$status" ;;  # later on it is a fault that passes
    {preempted})
        echo "Preempted: back into the queue, to go on from the checkpoint."
        scontrol requeue "$SLURM_JOB_ID" && sleep 60
        exit "$status" ;;
    esac
    echo "Attempt $attempt ended with status $status."
done
exit "$status"
"""


class Slurm:
    submit_command = ("sbatch", "--parsable")

    def script(self, command: Sequence[str], options: JobOptions) -> str:
        return _head(options) + f"exec srun {bash([options.python, *MODULE, *command])}\n"

    def distributed_script(self, command: TrainCommand, options: JobOptions) -> str:
        """Return a job whose nodes meet through SLURM's variables; what fails is tried again in the same allocation."""
        cluster = command.config.cluster
        # When a task has ended the others go on: they end themselves if they hang, and the head may have much to write.
        # A job with --export=NONE would keep its tasks from knowing the name of the launch.
        words = ["--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
        port = "" if command.sets("--master-port") else ' --master-port "$port"'
        call = bash([options.python, *MODULE, "train", *command.arguments])
        body = RUN.format(
            note="Statuses: 138 and 143 are a checkpoint after SIGUSR1 and SIGTERM; 0, 130 and a first 2 are final.",
            max_restarts=cluster.max_restarts,
            task=f"srun {bash(words)} {call}{port}",
            final=" | ".join(map(str, FINAL)),
            wrong=WRONG_INPUT,
            preempted=" | ".join(map(str, PREEMPTED)),
        )
        job = f"export {JOB_VARIABLE}={command.job}-$SLURM_JOB_ID  # finds the run that an earlier attempt began\n"
        port_line = f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))\n"
        return _head(options, requeue=True) + job + port_line + body

    def seconds(self, time_limit: str) -> int:
        """Read M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
        days, dash, text = time_limit.rpartition("-")
        parts = text.split(":")
        if len(parts) > 3 or not all(TIME_PART.fullmatch(part) for part in (*parts, *([days] if dash else []))):
            raise UserError(
                f"--time {time_limit} is not understood; SLURM reads minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or "
                "D-HH:MM:SS."
            )
        numbers = [int(part) for part in parts]
        if dash or len(numbers) == 3:
            hours, minutes, rest = [*numbers, 0, 0][:3]
        else:
            hours, (minutes, rest) = 0, [*numbers, 0][:2]
        total = (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + rest
        if total == 0:
            raise UserError(f"--time {time_limit} is no time; leave --time out for the partition's limit.")
        return total

    def state(self, job: str) -> str | None:
        done = ask(["squeue", "--noheader", "--jobs", job, "--format", "%T"])
        state = done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
        return state if state in UNFINISHED else None

    def status(self, job: str) -> int | None:
        done = ask(["scontrol", "show", "job", job])
        match = re.search(r"ExitCode=(\d+):(\d+)", done.stdout)
        if match is None:
            return None
        code, number = map(int, match.groups())
        cancelled = re.search(r"JobState=(CANCELLED|TIMEOUT|NODE_FAIL|PREEMPTED)", done.stdout)
        return 128 + number if number else code or (1 if cancelled else 0)

    def log_file(self, job: str, options: JobOptions) -> Path:
        name = re.sub(r"%[jA%]", lambda found: "%" if found.group() == "%%" else job, options.log or LOG)
        return Path(options.directory, name)


def _quoted(value: object) -> str:
    """Return a value as sbatch reads it in an #SBATCH line."""
    text = str(value)
    return text if not re.search(r"[\s'\"\\#]", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _head(options: JobOptions, *, requeue: bool = False) -> str:
    limit = Slurm().seconds(options.time_limit) if options.time_limit is not None else None
    log = str(Path(options.directory, options.log or LOG))
    if "\\" in log or ("%" in options.directory and log.startswith(options.directory)):
        raise UserError(
            f"The log file {log} would have another name: SLURM reads backslashes, and % even in the names of "
            "directories; choose another --log."
        )
    directives = [
        f"--job-name={_quoted(options.name)}",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        f"--output={_quoted(log)}",
        "--open-mode=append",
    ]
    optional = {
        "cpus-per-task": options.cpus_per_node,
        "mem": options.memory,
        "time": clock(limit) if limit is not None else None,
        "partition": options.partition,
        "account": options.account,
    }
    directives += [f"--{key}={_quoted(value)}" for key, value in optional.items() if value is not None]
    if requeue:
        directives.append("--requeue")
        if limit is not None:
            directives.append(f"--signal=USR1@{warning_before_the_end(limit, options)}")
    directives += options.directives
    head = job_head("#SBATCH", directives, options)
    if options.cpus_per_node is not None:
        head += 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it over by itself\n'
    return head
