"""Finds which node of how many this process is, and where the head is: from flags, torchrun's variables, or SLURM's."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError

# Environment variables that `rlcb launch` sets.
ATTEMPT_VARIABLE = "RLCB_ATTEMPT"  # the attempt's number: nodes of a failed attempt must not meet those of the next
JOB_VARIABLE = "RLCB_JOB"  # a name of this launch, the same in all its attempts


@dataclass(frozen=True)
class Placement:
    """Which node of a run this process is, and where the nodes meet."""

    rank: int | None  # None: the machine that has the head's address is 0, the others are numbered as they come
    num_nodes: int
    master_addr: str
    master_port: int
    attempt: str = "0"
    store_is_there: bool = False  # torchrun's agent runs the store that the nodes meet at
    source: str = "flags"
    job: str = ""  # name of the launch or scheduler job that started this process; the same after a restart
    is_restart: bool = False  # whether that job has started the run before, or may have


def find(config: Config, node_rank: int | None, environ: Mapping[str, str] = os.environ) -> Placement:
    place = _find(config, node_rank, environ)
    job = environ.get(JOB_VARIABLE, "")
    return replace(place, job=job, is_restart=True) if job else place


def _find(config: Config, node_rank: int | None, environ: Mapping[str, str]) -> Placement:
    if node_rank is not None:
        return _from_flags(config, node_rank, environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_torchrun(environ)
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        return _from_slurm(config, environ)
    return _from_flags(config, None, environ)


def _from_flags(config: Config, rank: int | None, environ: Mapping[str, str]) -> Placement:
    cluster = config.cluster
    if rank is not None and rank >= cluster.num_workers:
        raise UserError(
            f"--node-rank {rank} is not one of {cluster.num_workers} machines, which are numbered from 0; "
            "--num-nodes says how many there are."
        )
    if rank is None and cluster.num_workers == 1:
        rank = 0
    return Placement(
        rank, cluster.num_workers, cluster.master_addr, cluster.master_port, environ.get(ATTEMPT_VARIABLE, "0")
    )


def _from_torchrun(environ: Mapping[str, str]) -> Placement:
    if int(environ["LOCAL_WORLD_SIZE"]) > 1:
        raise UserError(
            f"torchrun started {environ['LOCAL_WORLD_SIZE']} processes on this machine; rlcb starts the workers of a "
            "machine itself: use torchrun --nproc-per-node 1."
        )
    return Placement(
        rank=int(environ["RANK"]),
        num_nodes=int(environ["WORLD_SIZE"]),
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        attempt=environ["TORCHELASTIC_RUN_ID"],  # not torchrun's count of restarts, which may differ between machines
        store_is_there=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source="torchrun",
        job=f"torchrun-{_parent()}",
        is_restart=True,
    )


def _from_slurm(config: Config, environ: Mapping[str, str]) -> Placement:
    if int(environ.get("SLURM_NTASKS_PER_NODE", "1")) > 1:
        raise UserError(
            "SLURM starts several tasks on each node; rlcb starts the workers of a machine itself: "
            "use srun --ntasks-per-node=1."
        )
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    is_set = config.cluster.master_addr != type(config.cluster).model_fields["master_addr"].default
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return Placement(
        rank=int(environ["SLURM_PROCID"]),
        num_nodes=int(environ["SLURM_NTASKS"]),
        master_addr=config.cluster.master_addr if is_set else first_host(nodes),
        master_port=config.cluster.master_port,
        attempt=f"{environ.get('SLURM_JOB_ID', '')}-{restarts}-{environ['SLURM_STEP_ID']}",
        source="SLURM",
        job=f"slurm-{environ.get('SLURM_JOB_ID', '')}",
        is_restart=restarts != "0",
    )


def _parent() -> str:
    """Return a name of the process that started this one, which no other process will ever have."""
    parent = psutil.Process(os.getppid())
    return f"{socket.gethostname()}-{parent.pid}-{parent.create_time():.2f}"


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: n03 for `n[03-07,9],m1`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise UserError(f"SLURM's node list {nodes!r} names no node; give the head's address with --master-addr.")
    return "".join(part or "" for part in match.groups())
