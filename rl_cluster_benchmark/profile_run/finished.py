"""What limited a run that is over, from the shares of its time: of any mode, several machines included."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rl_cluster_benchmark import hardware
from rl_cluster_benchmark.analysis.run_files import UnusableRunError
from rl_cluster_benchmark.analysis.runs import RunRecord, load_run
from rl_cluster_benchmark.analysis.text import plain
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.profile_run import report
from rl_cluster_benchmark.profile_run.figures import Process, Profile
from rl_cluster_benchmark.profile_run.verdict import judge


def explain(folder: Path) -> int:
    try:
        run = load_run(folder)
    except UnusableRunError as error:
        raise UserError(plain(f"{folder} {error}.")) from None
    summary = run.summary
    if not summary.phase_shares:
        raise UserError(
            f"{folder} says nothing about where its time went: it has not ended, or is not of this program."
        )
    cores = summary.usable_cores or summary.num_workers
    profile = Profile(
        processes=_processes(run, (summary.cpu_utilization or 0.0) * cores),
        fps=summary.avg_fps,
        cores=[],  # nobody looked
        precision=summary.precision or "float32",
        engine="unknown",
        threads=summary.num_threads or 1,
        batch=run.config.batch_size,
        passes_per_step=float(run.config.training.n_epochs),
        cost=None,
        peak=None,
        run={},
    )
    machine = dataclasses.replace(hardware.detect(), usable_cores=cores, flags=frozenset())
    report.show_finished(run, profile, judge(profile, run.config, machine))
    return 0


def _processes(run: RunRecord, cpu: float) -> list[Process]:
    """As many as there were, each like the mean; of IMPALA's roles each with what only it does."""
    shares, workers = run.summary.phase_shares, run.summary.num_workers
    learners = run.config.impala.num_learners
    idle = run.summary.asynchrony
    if not isinstance(learners, int) or not {"learner_idle", "actor_idle"} <= set(idle):
        return [_process("worker", rank, shares, cpu / workers) for rank in range(workers)]
    everyone = workers + learners
    acting = {name: shares.get(name, 0.0) * everyone / workers for name in ("env", "inference")}
    learning = {"update": shares.get("update", 0.0) * everyone / learners}
    return [
        *(_with_idle("learner", rank, learning, idle["learner_idle"], cpu / everyone) for rank in range(learners)),
        *(_with_idle("actor", rank, acting, idle["actor_idle"], cpu / everyone) for rank in range(workers)),
    ]


def _with_idle(role: str, rank: int, shares: dict[str, float], idle: float, cpu: float) -> Process:
    return _process(role, rank, shares | {"waiting": idle}, cpu)


def _process(role: str, rank: int, shares: dict[str, float], cpu: float) -> Process:
    known = {name: shares.get(name, 0.0) for name in report.PHASES}
    known["other"] = max(0.0, 1 - sum(share for name, share in known.items() if name != "other"))
    return Process(rank, role, 0.0, known, cpu, {}, {}, dict.fromkeys(report.PASS_NAMES, 0.0), [], 0.0)
