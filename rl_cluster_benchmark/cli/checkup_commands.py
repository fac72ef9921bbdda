"""The subcommand `rlcb doctor`; with --cluster the machines come from a hosts file or from our allocation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_cluster_benchmark.cli.arguments import start_signals
from rl_cluster_benchmark.cli.launch_commands import ssh_options
from rl_cluster_benchmark.core.errors import UserError

if TYPE_CHECKING:
    from rl_cluster_benchmark.tools.checkup.probe import Measurements

PORT = 29500


def doctor(args: argparse.Namespace) -> int:
    if args.cluster or args.hosts is not None:
        return _check_cluster(args)
    from rl_cluster_benchmark.tools import doctor as this_machine

    return this_machine.doctor()


def _check_cluster(args: argparse.Namespace) -> int:
    environ = os.environ
    hosts = args.hosts or (environ.get("PBS_NODEFILE") if args.node_rank is None else None)
    if hosts is not None:
        return _from_outside(args, hosts)
    in_slurm = int(environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))) > 1
    by_hand = args.node_rank is not None or args.num_nodes is not None
    if in_slurm and "SLURM_STEP_ID" not in environ and not by_hand:
        call = ["srun", "--ntasks-per-node=1", sys.executable, "-m", "rl_cluster_benchmark", *sys.argv[1:]]
        sys.stdout.flush()
        os.execvp(call[0], call)
    if not by_hand and not in_slurm and "TORCHELASTIC_RUN_ID" not in environ:
        raise UserError(
            "Say which machines: --hosts FILE, or run this in a SLURM or PBS job, under torchrun, or on every machine "
            "with --num-nodes N --master-addr HOST."
        )
    return _from_inside(args)


def _from_inside(args: argparse.Namespace) -> int:
    """Measure as one of the machines; the head prints what all have measured."""
    from rl_cluster_benchmark.cluster import placement
    from rl_cluster_benchmark.config import config_files
    from rl_cluster_benchmark.core.stop import Interrupted
    from rl_cluster_benchmark.tools.checkup import checkup_report
    from rl_cluster_benchmark.tools.checkup.probe import measure

    given = {
        "mode": "distributed",
        "cluster.num_workers": args.num_nodes,
        "cluster.master_addr": args.master_addr,
        "cluster.master_port": args.master_port or PORT,
        "cluster.interface": args.interface,
        "cluster.timeout": args.timeout,
        "cluster.join_timeout": args.timeout,
    }
    config = config_files.load(None, {key: value for key, value in given.items() if value is not None})
    signals = start_signals()
    try:
        measured = measure(config, placement.find(config, args.node_rank), signals)
    except Interrupted:
        return signals.status
    if measured is None:
        return 0
    if args.json == "-":  # to whoever has started this through ssh
        from rl_cluster_benchmark.tools.checkup.hosts import MARK

        print(MARK + json.dumps(measured.to_dict()), flush=True)
        return 0
    shown, stops = checkup_report.text(checkup_report.Checkup.of(measured))
    print(shown, flush=True)
    _write(args, measured)
    return int(stops)


def _from_outside(args: argparse.Namespace, hosts: str) -> int:
    from rl_cluster_benchmark.tools.checkup import checkup_report
    from rl_cluster_benchmark.tools.checkup import hosts as machines

    options = ssh_options(args, hosts)
    print(f"Asking {len(options.hosts)} machines through ssh ...", flush=True)
    answers = machines.ask_all(options)
    ready = [answer.host for answer in machines.able_to_meet(answers)]
    measured, errors = None, dict[str, str]()
    if len(ready) > 1:
        print(f"{len(ready)} of them measure together ...", flush=True)
        words = ["--timeout", args.timeout, "--master-port", args.master_port or PORT]
        words += ["--interface", args.interface] if args.interface else []
        measured, errors = machines.measure_through_ssh(options, ready, list(map(str, words)), 3 * args.timeout + 60)
    shown, stops = checkup_report.text(checkup_report.Checkup.of(measured, answers, errors))
    print("", shown, sep="\n", flush=True)
    if measured is not None:
        _write(args, measured)
    return int(stops)


def _write(args: argparse.Namespace, measured: Measurements) -> None:
    from rl_cluster_benchmark.core.output_files import write_output

    if args.json:
        write_output(Path(args.json), (json.dumps(measured.to_dict(), indent=2) + "\n").encode())
        print(f"Saved {args.json}", flush=True)
