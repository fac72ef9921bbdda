"""What a distributed run needs besides training: meet the other machines, agree on the work, follow the head, leave."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.cluster import placement
from rl_cluster_benchmark.cluster.rendezvous import Cluster, meet
from rl_cluster_benchmark.cluster.store import limited as _limited
from rl_cluster_benchmark.cluster.store import told_if_silent
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.atomic_files import cannot_write, temporary_name
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Interrupted, Signals
from rl_cluster_benchmark.machine import planning

CHUNK = 1 << 20  # bytes of a checkpoint that are sent through the store as one value
SECONDS_BEYOND = 30.0  # after cluster.join_timeout, until a process that is blocked is ended
SECONDS_TO_SEE_A_FILE = 15.0  # network filesystems show a new file late


@contextlib.contextmanager
def met(config: Config, signals: Signals, node_rank: int | None) -> Iterator[Cluster]:
    """Meet the other machines, and be one of them within the context; errors there are told to the others."""
    place = placement.find(config, node_rank)
    if place.num_nodes > 1:
        who = "this machine" if place.rank is None else f"node {place.rank}"
        print(
            f"Waiting for {place.num_nodes} machines at {place.master_addr}:{place.master_port} "
            f"({who}, from {place.source})",
            flush=True,
        )
    with _limited(config.cluster.join_timeout + SECONDS_BEYOND, "The head's store did not answer any more."):
        cluster = meet(config, place, signals)
    try:
        yield cluster
    except (UserError, TrainingFailedError, OSError) as error:
        cluster.membership.report_failure(str(error))
        raise
    except Interrupted:
        cluster.membership.report_failure("a signal came before training began.")
        raise
    except BaseException as error:
        cluster.membership.report_failure(f"{type(error).__name__}: {error}")
        raise
    cluster.membership.leave()


def on_this_cluster(
    config: Config, cluster: Cluster, resumed_from: dict[str, Any] | None
) -> tuple[Config, planning.Plan]:
    """Return the head's config with the numbers of machines and environments of this cluster, and the plan for it."""
    num_envs = resumed_from["config"]["env"]["num_envs"] if resumed_from is not None else None
    config = planning.on_machines(config, len(cluster.nodes), cluster.num_workers, cluster.num_learners, num_envs)
    return config_of_this_node(config, cluster)


@told_if_silent()
def agree_on_work(
    cluster: Cluster, config: Config, root: Path, checkpoint: Path | None, progress: dict[str, Any]
) -> None:
    """Send the others, from the head, the config and the checkpoint to train from; wait until all are ready."""
    token = temporary_name(root / f"seen-by-all-{uuid.uuid4().hex}")  # if this is killed, the next run removes it
    content = checkpoint.read_bytes() if checkpoint is not None else b""
    chunks = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
    for index, chunk in enumerate(chunks):
        cluster.store.set(f"checkpoint/{index}", chunk)
    try:
        token.write_text(token.name)
    except OSError as error:
        raise cannot_write(token, error) from None
    try:
        cluster.publish(
            "work",
            {
                "config": config_files.to_dict(config),
                "progress": progress,
                "chunks": len(chunks),
                "token": str(token.resolve()),
            },
        )
        with _limited(cluster.join_timeout + SECONDS_BEYOND, "A machine that had joined did not become ready."):
            for rank in range(1, len(cluster.nodes)):
                cluster.read(f"ready/{rank}")
    finally:
        token.unlink(missing_ok=True)
        for index in range(len(chunks)):
            cluster.store.delete_key(f"checkpoint/{index}")


def send_home(cluster: Cluster) -> None:
    """Tell the others, from the head, that the run has already finished; wait until all have read that."""
    cluster.publish("work", None)
    for rank in range(1, len(cluster.nodes)):
        cluster.read(f"ready/{rank}")


def follow(cluster: Cluster) -> int:
    """Train on a machine that is not the head, as the head says; return the exit status."""
    from rl_cluster_benchmark.processes.watchdog import limit_of, watched
    from rl_cluster_benchmark.training import executions

    label = cluster.label(cluster.rank)
    with _limited(cluster.join_timeout + SECONDS_BEYOND, "The head did not say what to do."):
        work = cluster.read("work")
    if work is None:
        cluster.publish(f"ready/{cluster.rank}", True)
        print(f"{label}: nothing is left to do", flush=True)
        return 0
    config = config_files.build(work["config"], {}, source="the head's config")
    if config.cluster.shared_filesystem:
        _check_sees(Path(work["token"]), label, cluster.nodes[0].name)
    config, plan = config_of_this_node(config, cluster)
    plan = planning.compiled(config, plan)
    with _received_checkpoint(cluster, work["chunks"]) as path:
        cluster.publish(f"ready/{cluster.rank}", True)
        print(f"{label}: {cluster.nodes[cluster.rank].processes}, the head is {cluster.nodes[0].name}", flush=True)
        with watched(limit_of(config), is_parent=True):
            executions.follow(cluster, config, plan, path, work["progress"])
    print(f"{label}: {'stopped by a signal' if cluster.signals.received else 'finished'}", flush=True)
    return cluster.signals.status


def config_of_this_node(config: Config, cluster: Cluster) -> tuple[Config, planning.Plan]:
    """Return the head's config with this machine's own numbers of workers and learners, and the plan for it."""
    this = cluster.nodes[cluster.rank]
    return planning.on_one_of_them(config, this.num_workers, this.num_learners)


@contextlib.contextmanager
def _received_checkpoint(cluster: Cluster, num_chunks: int) -> Iterator[Path | None]:
    """Provide the head's checkpoint as a file of this process within the context; None if it sent none."""
    if num_chunks == 0:
        yield None
        return
    with open(os.memfd_create("rlcb-checkpoint", os.MFD_CLOEXEC), "wb") as file:  # has no name that a kill could leave
        with told_if_silent():
            for index in range(num_chunks):
                file.write(cluster.store.get(f"checkpoint/{index}"))
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def _check_sees(token: Path, label: str, head: str) -> None:
    deadline = time.monotonic() + SECONDS_TO_SEE_A_FILE
    while True:
        with contextlib.suppress(OSError):
            os.listdir(token.parent)  # makes a network filesystem look again
            if token.read_text() == token.name:
                return
        if time.monotonic() > deadline:
            raise UserError(
                f"{label} does not see the run directory {token.parent} of the head ({head}): choose an --output-dir "
                "on a filesystem that all machines share, or set cluster.shared_filesystem=false if only the head "
                "needs it (a restart then needs the same head)."
            )
        time.sleep(0.2)
