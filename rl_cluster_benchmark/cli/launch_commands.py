"""The subcommands of `rlcb launch`: which launcher each set of arguments calls."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.cli.arguments import settings_from, start_signals
from rl_cluster_benchmark.tools.launch import names

if TYPE_CHECKING:
    from rl_cluster_benchmark.tools.launch.command import TrainCommand
    from rl_cluster_benchmark.tools.launch.jobs import JobOptions
    from rl_cluster_benchmark.tools.launch.ssh import SshOptions


def _command(args: argparse.Namespace, num_nodes: int | None) -> TrainCommand:
    from rl_cluster_benchmark.tools.launch.command import TrainCommand

    return TrainCommand.parse(args.words, args.parse_train, num_nodes=num_nodes)


def local(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch import local

    return local.launch(_command(args, args.nodes), args.nodes, start_signals())


def ssh_options(args: argparse.Namespace, hosts: str) -> SshOptions:
    """Return how to reach these hosts, as the arguments say."""
    from rl_cluster_benchmark.tools.launch import ssh
    from rl_cluster_benchmark.tools.launch.command import interpreter

    client, directory = ssh.ssh_client(args.ssh_option), args.directory or os.getcwd()
    return ssh.SshOptions(ssh.read_hosts(hosts), client, directory, interpreter(args.python), args.activate, args.env)


def ssh(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch import ssh

    options = ssh_options(args, args.hosts)
    return ssh.launch(_command(args, len(options.hosts)), options, start_signals())


def _job_options(args: argparse.Namespace, log: str | None) -> JobOptions:
    from rl_cluster_benchmark.tools.launch.command import interpreter
    from rl_cluster_benchmark.tools.launch.jobs import JobOptions

    directory = str(Path(args.directory or os.getcwd()).resolve())
    return settings_from(JobOptions, args, log=args.log or log, directory=directory, python=interpreter(args.python))


def slurm(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch.slurm import Slurm

    system, options, command = Slurm(), _job_options(args, None), _command(args, args.nodes)
    script = system.distributed_script(command, options)
    return _submit(args, system, options, script, _script_file(args, command))


def pbs(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.core.errors import UserError
    from rl_cluster_benchmark.tools.launch.pbs import Pbs

    values = [variable.partition("=")[0] for variable in args.env if "=" in variable]
    if values:
        raise UserError(
            f"--env {values[0]}=... is not for PBS, whose job script others may read: give the name alone, and let the "
            "job get the value from --activate."
        )
    system, command = Pbs(), _command(args, args.nodes)
    script_file = _script_file(args, command)
    options = _job_options(args, f"{script_file.stem}.out")
    script = system.distributed_script(
        command,
        options,
        script_file=script_file,
        hosts_file=args.hosts,
        ssh_arguments=[f"--ssh-option={option}" for option in args.ssh_option] + [f"--env={name}" for name in args.env],
    )
    return _submit(args, system, options, script, script_file)


def _submit(args: argparse.Namespace, system: Any, options: JobOptions, script: str, script_file: Path) -> int:
    from rl_cluster_benchmark.tools.launch import jobs

    if args.dry_run:
        print(script, end="")
        return 0
    job = jobs.submit_script(system, script, script_file)
    log = system.log_file(job, options)
    print(f"Job {job} submitted as {script_file}; its output goes to {log}", flush=True)
    return jobs.follow(system, job, options, start_signals()) if args.follow else 0


def _script_file(args: argparse.Namespace, command: TrainCommand) -> Path:
    return Path(args.script or f"{names.file_name(args.name)}-{command.job[:8]}.sh")


def ray(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch import ray

    return ray.launch(
        _command(args, args.nodes),
        address=args.address,
        num_nodes=args.nodes,
        directory=args.directory or os.getcwd(),
        variables=args.env,
        signals=start_signals(),
    )
