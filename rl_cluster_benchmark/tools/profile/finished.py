"""What limited a run that is over, from the shares of its time: of any mode, several machines included."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.text import plain
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.analysis.run_files import UnusableRunError
from rl_cluster_benchmark.tools.analysis.runs import RunRecord, load_run
from rl_cluster_benchmark.tools.profile import profile_report
from rl_cluster_benchmark.tools.profile.figures import Process, Profile, passes_per_step
from rl_cluster_benchmark.tools.profile.verdict import judge


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
    cores = summary.usable_cores or summary.num_workers or 1
    profile = Profile(
        processes=_processes(run, (summary.cpu_utilization or 0.0) * cores),
        fps=summary.avg_fps,
        cores=[],  # nobody looked
        precision=summary.precision or "float32",
        engine="unknown",
        threads=summary.num_threads or 1,
        batch=run.config.batch_size,
        passes_per_step=passes_per_step(run.config),
        cost=None,
        peak=None,
        run={},
    )
    machine = dataclasses.replace(detection.detect(), usable_cores=cores, flags=frozenset())
    profile_report.show_finished(run, profile, judge(profile, run.config, machine))
    return 0


def _processes(run: RunRecord, cpu: float) -> list[Process]:
    """Return as many processes as there were, each like the mean; IMPALA's roles have what only they do.

    How much of the communication was whose is not known: it is divided like the time that is left of each role's.
    """
    shares, workers = run.summary.phase_shares, run.summary.num_workers or 1
    learners, own = run.summary.num_learners, run.config.impala.num_learners
    if learners is None and isinstance(own, int):  # an older summary: as many on each machine as the config says
        learners = own * run.config.num_machines
    idle = run.summary.asynchrony
    if not learners or not {"learner_idle", "actor_idle"} <= set(idle):
        return [_process("worker", rank, shares, cpu / workers) for rank in range(workers)]
    everyone = workers + learners
    acting = {name: shares.get(name, 0.0) * everyone / workers for name in ("env", "inference")}
    learning = {"update": shares.get("update", 0.0) * everyone / learners}
    acting["waiting"], learning["waiting"] = idle["actor_idle"], idle["learner_idle"]
    left = [max(0.0, 1 - sum(role.values())) for role in (learning, acting)]
    total = learners * left[0] + workers * left[1]
    part = min(1.0, shares.get("communication", 0.0) * everyone / total) if total > 0 else 0.0
    learning["communication"], acting["communication"] = (part * time for time in left)
    return [
        *(_process("learner", rank, learning, cpu / everyone) for rank in range(learners)),
        *(_process("actor", rank, acting, cpu / everyone) for rank in range(workers)),
    ]


def _process(role: str, rank: int, shares: dict[str, float], cpu: float) -> Process:
    known = {name: shares.get(name, 0.0) for name in profile_report.PHASES}
    known["other"] = max(0.0, 1 - sum(share for name, share in known.items() if name != "other"))
    return Process(rank, role, 0.0, known, cpu, {}, {}, dict.fromkeys(profile_report.PASS_NAMES, 0.0), [], 0.0)
