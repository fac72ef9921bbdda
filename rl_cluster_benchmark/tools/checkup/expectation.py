"""How well a run would scale on machines that were measured: the model of `rlcb scaling --project`, with an estimate of
the work in place of a measured run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.tools.checkup.probe import SAMPLES, Member, Sums
from rl_cluster_benchmark.tools.scaling import model

PRESET = "ppo_cpu_cluster"
INFERENCE = 0.4  # of a training pass: a forward pass, and the environment's step
GOOD = 0.8  # of what the machines give
LARGER = 8  # times the minibatch, when the usual one is too small for the network


def network_of(sums: Sums) -> model.Network:
    found = model.network_from(sums.nodes, sums.small, sums.size, sums.gradient)
    half = model.ring_seconds(sums.nodes, sums.size / 2 + model.EXACT_BYTES, found)
    return model.Network(found.latency, found.bandwidth, max(0.0, sums.compressed - half))


def spread_of(members: Sequence[Member]) -> model.Spread:
    times = [member.pass_seconds for member in members]
    between = statistics.pstdev(times) / statistics.mean(times)
    jitter = statistics.median(member.jitter for member in members)
    return model.Spread(between, jitter, piece_seconds=statistics.median(times))


def work_of(members: Sequence[Member], vector_bytes: int, *, times: int = 1) -> model.MachineWork:
    """Estimate a machine's work in an update of the preset with a worker on each core and `times` its minibatch."""
    training = config_files.load(PRESET).training
    per_worker = (config_files.load(PRESET).parallel.num_envs_per_worker or 1) * training.n_steps
    workers = sum(member.usable_cores for member in members)
    each_epoch = max(1, round(workers * per_worker / (training.batch_size * times)))
    sample = statistics.mean(member.pass_seconds for member in members) / SAMPLES  # on one core, of one worker
    return model.MachineWork(
        steps=per_worker * workers / len(members),
        rollout_seconds=INFERENCE * sample * per_worker,
        minibatch_seconds=sample * per_worker / each_epoch,
        minibatches=training.n_epochs * each_epoch,
        vector_bytes=vector_bytes,
    )


def lines(members: Sequence[Member], sums: Sums) -> list[str]:
    """Say what share of the machines' speed each way of averaging would keep, also with a larger minibatch."""
    batch = config_files.load(PRESET).training.batch_size
    rows = [f"To expect of PPO with the IMPALA-CNN (preset {PRESET}; an estimate, docs/cluster.md says how):"]
    for times in (1, LARGER):
        kept = ", ".join(f"{name} {share:.0%}" for name, share in efficiencies(members, sums, times=times).items())
        rows.append(f"  training.batch_size={batch * times}: of {sums.nodes} times one machine, {kept}")
    return rows


def efficiencies(members: Sequence[Member], sums: Sums, *, times: int = 1) -> dict[str, float]:
    work, network, spread = work_of(members, sums.size, times=times), network_of(sums), spread_of(members)
    strategies = (model.ALLREDUCE, model.COMPRESSED, model.LOCAL_SGD)
    return {name: model.project(name, sums.nodes, work, network, spread).efficiency for name in strategies}


def advice(members: Sequence[Member], sums: Sums) -> tuple[str, str] | None:
    """Return what the network costs and what helps, if it costs much."""
    work, network = work_of(members, sums.size), network_of(sums)
    kept = model.project(model.ALLREDUCE, sums.nodes, work, network, model.Spread()).efficiency
    if kept >= GOOD:
        return None
    return (
        f"With the preset's minibatches, an all-reduce of every gradient leaves {kept:.0%} of the machines' speed.",
        "use a larger training.batch_size, then cluster.compression=bfloat16, then cluster.sync=local_sgd",
    )
