"""The summary of a run, as a file and as a block on the screen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rl_cluster_benchmark.config.traits import is_sequential
from rl_cluster_benchmark.core.atomic_files import write_json
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.text import timestamp
from rl_cluster_benchmark.run import metrics
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.run import FINAL_FPS_UPDATES, Run


@contextlib.contextmanager
def written(run: Run) -> Iterator[None]:
    """Write and show the summary of a run when its training, which this context is, ends or fails."""
    try:
        yield
    except TrainingFailedError as error:
        if run.has_begun():
            with contextlib.suppress(TrainingFailedError, OSError):  # the disk may be full, which `error` says
                _write(run, "failed", str(error))
        raise
    else:
        if run.has_begun():
            number = run.signals.received
            state, reason = ("finished", None) if number is None else ("interrupted", f"signal {number}")
            run.read_memory()
            _write(run, state, reason)
    finally:
        run.close()


def _write(run: Run, state: str, reason: str | None) -> None:
    run.settle()
    summary, directory = described(run, state, reason), run.directory
    try:
        write_json(directory.summary, summary)
        write_json(directory.benchmark_metrics, summary)  # the same under an older name
        metrics.write_columns(directory.metrics, metrics.read_lines(directory.metrics_log))
    finally:
        run.close()  # with a last line of progress
        with contextlib.suppress(OSError):
            print(block(summary, directory), flush=True)


def described(run: Run, state: str, reason: str | None) -> dict[str, Any]:
    """Return the content of training_summary.json for a run that has ended."""
    config, elapsed, machine = run.config, run.elapsed, run.plan.machine
    return {
        "run_id": run.run_id,
        "algorithm": config.traits.label,
        "mode": config.mode,
        "env": config.env.name,
        "seed": config.env.seed,
        "state": state,
        "reason": reason,
        "num_envs": config.env.num_envs,
        "num_workers": run.num_workers,
        "num_learners": run.machines.num_learners,
        "nodes": [name for name, _, _ in run.machines.shares] or None,
        "duration_hours": elapsed / 3600,
        "total_timesteps": run.steps,
        "total_updates": run.updates,
        "avg_fps": run.steps / run.last_update_at if run.last_update_at > 0 else 0.0,
        "final_fps": final_fps(run),
        "peak_memory_gb": run.peak_memory / 1e9,
        "memory_per_worker_mb": run.peak_worker_memory / 1e6 or None,  # null without worker processes
        **run.episodes.summary(),
        "asynchrony": run.asynchrony.summary(),
        "bad_numbers": dict(run.bad_numbers),  # counts of what was NaN or infinite, and left out
        "phase_shares": run.clock.shares(elapsed),
        "cpu_utilization": run.cpu_seconds / elapsed / run.usable_cores if elapsed > 0 else 0.0,
        "num_threads": run.plan.num_threads,
        "precision": run.plan.precision,
        "engine": run.plan.engine,
        "cpu_model": machine.cpu_model,
        "usable_cores": run.usable_cores,
        "parts": run.parts(),
        "checkpoint": run.newest_checkpoint,
        "finished_at": timestamp(),
        **run.code,
    }


def final_fps(run: Run) -> float:
    """Return the speed over the last ten updates and at least the last second of this process.

    Several updates may share one moment: reports of other machines come in lumps. A run that was already complete
    and made no update takes the last lines of its log.
    """
    recent = list(run.recent)
    if len(recent) == 1:
        lines = metrics.read_lines(run.directory.metrics_log)[-FINAL_FPS_UPDATES - 1 :]
        recent = [(line["time"], int(line["step"])) for line in lines] or recent
    (start, first), (end, last) = recent[0], recent[-1]
    return (last - first) / (end - start) if end > start else 0.0


def block(summary: dict[str, Any], directory: RunDirectory) -> str:
    """Return the block TRAINING SUMMARY, which ends the output of every run."""
    line = "=" * 70
    rows = [line, "TRAINING SUMMARY", line]
    if summary["state"] != "finished":
        rows.append(f"State: {summary['state']} ({summary['reason']})")
    shares = summary["phase_shares"].items()
    per_worker = summary["memory_per_worker_mb"]
    rows.append(f"Duration: {summary['duration_hours']:.2f} hours")
    if not is_sequential(summary["mode"]):
        if summary["nodes"]:
            rows.append(f"Machines: {len(summary['nodes'])} ({', '.join(summary['nodes'])})")
        learners = summary.get("num_learners")
        workers = f"Actors: {summary['num_workers']}, Learners: {learners}" if learners else None
        rows += [workers or f"Workers: {summary['num_workers']}", f"Total Environments: {summary['num_envs']}"]
    rows += [
        f"Total Timesteps: {summary['total_timesteps']:,}",
        f"Total Updates: {summary['total_updates']:,}",
        f"Average FPS: {summary['avg_fps']:,.0f}",
        f"Final FPS: {summary['final_fps']:,.0f}",
        "",
        "Performance:",
        f"  Initial Reward: {_reward(summary, 'initial_reward')}",
        f"  Final Reward: {_reward(summary, 'final_reward')}",
        f"  Best Reward: {_reward(summary, 'best_reward')}",
        f"  Episodes: {summary['num_episodes']:,}",
        "",
        "Resource Usage:",
        f"  Peak Memory: {summary['peak_memory_gb']:.2f} GB",
        *([f"  Memory per Worker: {per_worker:.0f} MB"] if per_worker else []),
        f"  CPU Utilization: {summary['cpu_utilization']:.0%} of {summary['usable_cores']} cores",
        f"  Time: {', '.join(f'{name} {share:.0%}' for name, share in shares)}",
        *_asynchrony(summary["asynchrony"]),
        *_bad_numbers(summary["bad_numbers"]),
        "",
        f"Results saved to: {directory.root}",
    ]
    return "\n".join([*rows, line])


def _asynchrony(means: dict[str, float]) -> list[str]:
    """Return the lines about policy lag and idle times; none if the run has no asynchrony to report."""
    if not means:
        return []
    lag, most = means["policy_lag"], means["policy_lag_max"]
    rows = [f"  Policy Lag: {lag:.1f} gradient steps on average, {most:.0f} at most"]
    if "learner_idle" in means:
        rows.append(f"  Idle: actors {means['actor_idle']:.0%}, learners {means['learner_idle']:.0%} of their time")
        rows.append(f"  Actor Restarts: {means['actor_restarts']:.0f}")
    if "parameter_exchanges" in means:
        rows.append(f"  Parameter Exchanges: {means['parameter_exchanges']:.0f} between machines")
    return ["", "Asynchrony:", *rows]


def _bad_numbers(counts: dict[str, float]) -> list[str]:
    if not counts:
        return []
    found = ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in counts.items())
    return ["", f"NaN or Infinite, Left Out: {found}"]


def _reward(summary: dict[str, Any], key: str) -> str:
    if summary[key] is None:
        return "no episode has ended yet"
    std = summary.get(f"{key}_std")
    return f"{summary[key]:.2f}" if std is None else f"{summary[key]:.2f} ± {std:.2f}"
