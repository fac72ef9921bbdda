"""The arguments of `rlcb launch`, and which launcher each set of them calls."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.cli.arguments import positive, settings_from, start_signals
from rl_cluster_benchmark.tools.launch import names

if TYPE_CHECKING:
    from rl_cluster_benchmark.tools.launch.command import TrainCommand
    from rl_cluster_benchmark.tools.launch.jobs import JobOptions
    from rl_cluster_benchmark.tools.launch.ssh import SshOptions

DESCRIPTION = """\
Start `rlcb train --mode distributed` on several machines. When a machine is lost the run starts again from its last
checkpoint, up to cluster.max_restarts times, with fewer machines if cluster.min_nodes allows it."""
EXAMPLES = """\
examples:
  rlcb launch local --nodes 2 -- train --env coinrun --output-dir runs/a
  rlcb launch ssh --hosts hosts.txt -- train --config config/ppo_cpu_cluster.yaml --output-dir /shared/runs/a
  rlcb launch slurm --nodes 4 --cpus-per-node 32 --time 08:00:00 --follow -- train --output-dir runs/a
  rlcb launch pbs --nodes 4 --cpus-per-node 32 --queue work --dry-run -- train --output-dir runs/a
  rlcb launch ray --address auto -- train --output-dir /shared/runs/a
"""


def add_parser(commands: Any) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    launch = commands.add_parser(
        "launch",
        help="start a distributed run: local, ssh, slurm, pbs, ray",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    engines = launch.add_subparsers(title="engines", metavar="ENGINE", required=True)
    local = _engine(engines, "local", "several nodes on this machine, to try it out", _local)
    local.add_argument("--nodes", type=positive, default=2, metavar="N", help="default: 2")

    ssh = _engine(engines, "ssh", "a node on each machine of a hosts file", _ssh)
    ssh.add_argument(
        "--hosts", type=names.line, required=True, metavar="FILE",
        help="a machine per line, the head first: node1 [addr=10.0.0.1] [workers=16]; or node1,node2",
    )  # fmt: skip
    add_remote_arguments(ssh)
    add_ssh_option(ssh)

    slurm = _engine(engines, "slurm", "a SLURM job", _slurm)
    _add_job_arguments(slurm, queue="--partition", log="rlcb-%%j.out", directive="#SBATCH")

    pbs = _engine(engines, "pbs", "a PBS job", _pbs)
    _add_job_arguments(pbs, queue="--queue", log="<script>.out", directive="#PBS")
    pbs.add_argument("--hosts", type=names.line, metavar="FILE", help="instead of the job's $PBS_NODEFILE")
    _add_env(pbs, "NAME", "hand on this variable of the job to its other machines")
    add_ssh_option(pbs)

    ray = _engine(engines, "ray", "the machines of a Ray cluster", _ray)
    ray.add_argument(
        "--address",
        type=names.line,
        metavar="ADDR",
        help="of a cluster that is there: auto, host:port; default: start one",
    )
    ray.add_argument("--nodes", type=positive, metavar="N", help="default: all machines of the cluster")
    ray.add_argument(
        "--directory", type=names.line, metavar="DIR", help="working directory on every machine; default: this one"
    )
    _add_env(ray, "NAME[=VALUE]", "hand on this variable")


def _engine(engines: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser = engines.add_parser(name, help=text, description=f"Start a distributed run: {text}.")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- train ...", help="what to launch")
    parser.set_defaults(run=run)
    return parser


def add_remote_arguments(parser: Any) -> None:
    text = names.line
    parser.add_argument("--python", type=text, metavar="FILE", help="interpreter on the machines; default: this one")
    parser.add_argument(
        "--directory", type=text, metavar="DIR", help="working directory on the machines; default: this one"
    )
    parser.add_argument("--activate", metavar="COMMAND", help="shell command that prepares the environment there")
    _add_env(parser, "NAME[=VALUE]", "hand on this variable")


def _add_env(parser: Any, form: str, text: str) -> None:
    parser.add_argument("--env", type=names.variable, action="append", default=[], metavar=form, help=text)


def add_ssh_option(parser: Any) -> None:
    parser.add_argument(
        "--ssh-option", type=names.line, action="append", default=[], metavar="KEY=VALUE", help="ssh -o KEY=VALUE"
    )


def _add_job_arguments(parser: argparse.ArgumentParser, *, queue: str, log: str, directive: str) -> None:
    text = names.line
    parser.add_argument("--nodes", type=positive, required=True, metavar="N", help="machines")
    parser.add_argument("--cpus-per-node", type=positive, metavar="N", help="cores of each")
    parser.add_argument("--memory", type=text, metavar="SIZE", help="of each machine, as the batch system writes it")
    parser.add_argument(
        "--time",
        type=text,
        dest="time_limit",
        metavar="HH:MM:SS",
        help="time limit; the run saves and requeues before it",
    )
    parser.add_argument(queue, type=text, dest="partition", metavar="NAME", help="where to queue the job")
    parser.add_argument("--account", type=text, metavar="NAME", help="whom to charge")
    parser.add_argument("--job-name", type=text, default="rlcb", dest="name", metavar="NAME", help="default: rlcb")
    parser.add_argument("--log", type=text, metavar="FILE", help=f"the job's output; default: {log}")
    parser.add_argument("--activate", metavar="COMMAND", help="shell command that prepares the environment")
    parser.add_argument("--python", type=text, metavar="FILE", help="interpreter in the job; default: this one")
    parser.add_argument("--directory", type=text, metavar="DIR", help="working directory of the job; default: this one")
    parser.add_argument(
        "--option",
        type=text,
        action="append",
        default=[],
        dest="directives",
        metavar="LINE",
        help=f"a further {directive} line",
    )
    parser.add_argument(
        "--script", type=text, metavar="FILE",
        help="a new file for the job script; default: <job name>-<a number of its own>.sh, here",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the job script, submit nothing")
    parser.add_argument("--follow", action="store_true", help="show the job's output until it ends")


def _command(args: argparse.Namespace, num_nodes: int | None) -> TrainCommand:
    from rl_cluster_benchmark.tools.launch.command import TrainCommand

    return TrainCommand.parse(args.words, args.parse_train, num_nodes=num_nodes)


def _local(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch import local

    return local.launch(_command(args, args.nodes), args.nodes, start_signals())


def ssh_options(args: argparse.Namespace, hosts: str) -> SshOptions:
    """Return what add_remote_arguments and add_ssh_option have read, for these hosts."""
    from rl_cluster_benchmark.tools.launch import ssh
    from rl_cluster_benchmark.tools.launch.command import interpreter

    client, directory = ssh.ssh_client(args.ssh_option), args.directory or os.getcwd()
    return ssh.SshOptions(ssh.read_hosts(hosts), client, directory, interpreter(args.python), args.activate, args.env)


def _ssh(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch import ssh

    options = ssh_options(args, args.hosts)
    return ssh.launch(_command(args, len(options.hosts)), options, start_signals())


def _job_options(args: argparse.Namespace, log: str | None) -> JobOptions:
    from rl_cluster_benchmark.tools.launch.command import interpreter
    from rl_cluster_benchmark.tools.launch.jobs import JobOptions

    directory = str(Path(args.directory or os.getcwd()).resolve())
    return settings_from(JobOptions, args, log=args.log or log, directory=directory, python=interpreter(args.python))


def _slurm(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch.slurm import Slurm

    system, options, command = Slurm(), _job_options(args, None), _command(args, args.nodes)
    script = system.distributed_script(command, options)
    return _submit(args, system, options, script, _script_file(args, command))


def _pbs(args: argparse.Namespace) -> int:
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


def _ray(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.launch import ray

    return ray.launch(
        _command(args, args.nodes),
        address=args.address,
        num_nodes=args.nodes,
        directory=args.directory or os.getcwd(),
        variables=args.env,
        signals=start_signals(),
    )
