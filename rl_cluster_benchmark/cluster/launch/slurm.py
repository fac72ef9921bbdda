"""`rlcb launch slurm`: a job script for sbatch, one task per node; a preempted run puts itself back into the queue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_cluster_benchmark.cluster.launch.command import MODULE, TrainCommand
from rl_cluster_benchmark.cluster.launch.jobs import FINAL, PREEMPTED, JobOptions, ask, bash, seconds

FIRST_PORT, PORTS = 20_000, 20_000  # of the rendezvous, one per job
SECONDS_TO_END = 30  # for the other tasks, beyond cluster.timeout, when one has ended
UNFINISHED = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "STOPPED"}

RUN = """\
# {note}
cancelled=0
trap 'cancelled=1' TERM  # scancel reaches this shell too; a preemption reaches the tasks alone
resume=({first})
[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && resume=(--resume)
status=1
for attempt in $(seq 0 {max_restarts}); do
    {task}
    status=$?
    [ "$cancelled" -eq 1 ] && exit "$status"
    case $status in
    {final}) exit "$status" ;;
    {preempted})
        echo "Preempted: back into the queue, to go on from the checkpoint."
        scontrol requeue "$SLURM_JOB_ID" && sleep 60
        exit "$status" ;;
    esac
    resume=(--resume)
    echo "Attempt $attempt ended with status $status."
done
exit "$status"
"""


class Slurm:
    submit_command = ("sbatch", "--parsable")

    def script(self, command: Sequence[str], options: JobOptions) -> str:
        return _head(options) + f"exec srun {bash([options.python, *MODULE, *command])}\n"

    def distributed_script(self, command: TrainCommand, options: JobOptions) -> str:
        """The nodes find each other through SLURM's variables. What fails is tried again in the same allocation."""
        cluster = command.config.cluster
        words = ["--kill-on-bad-exit=0", f"--wait={int(cluster.timeout) + SECONDS_TO_END}"]
        port = "" if command.sets("--master-port") else ' --master-port "$port"'
        call = bash([options.python, *MODULE, "train", *command.lasting])
        body = RUN.format(
            note="Statuses: 138 and 143 are a checkpoint after SIGUSR1 and SIGTERM; 0, 2 and 130 are final.",
            max_restarts=cluster.max_restarts,
            task=f'srun {bash(words)} {call}{port} "${{resume[@]}}"',
            first=command.first_time,
            final=" | ".join(map(str, FINAL)),
            preempted=" | ".join(map(str, PREEMPTED)),
        )
        port_line = f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))\n"
        return _head(options, requeue=True) + port_line + body

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
        return Path(options.directory, (options.log or "rlcb-%j.out").replace("%j", job))

    def cancel(self, job: str) -> None:
        ask(["scancel", job])


def _head(options: JobOptions, *, requeue: bool = False) -> str:
    directives = [
        f"--job-name={options.name}",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        f"--output={options.log or 'rlcb-%j.out'}",
        "--open-mode=append",
    ]
    optional = {
        "cpus-per-task": options.cpus_per_node,
        "mem": options.memory,
        "time": options.time_limit,
        "partition": options.partition,
        "account": options.account,
    }
    directives += [f"--{key}={value}" for key, value in optional.items() if value is not None]
    if requeue:
        directives.append("--requeue")
        if options.time_limit and seconds(options.time_limit) > 2 * options.warning_seconds:
            directives.append(f"--signal=USR1@{options.warning_seconds}")
    directives += options.directives
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives), ""]
    lines += [f"cd {bash([options.directory])} || exit 2", "export PYTHONUNBUFFERED=1 RLCB_PROGRESS=lines"]
    if options.activate:
        lines.append(f"{options.activate} || exit 2")
    if options.cpus_per_node is not None:
        lines.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it over by itself')
    return "\n".join(lines) + "\n"
