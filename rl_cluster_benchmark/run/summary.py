"""The summary of a run, as a file and as a block on the screen."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.config.traits import is_sequential
from rl_cluster_benchmark.core.atomic_files import write_json
from rl_cluster_benchmark.run.directory import RunDirectory

PACKAGES = ("torch", "numpy", "envpool")


def write(directory: RunDirectory, summary: dict[str, Any]) -> None:
    write_json(directory.summary, summary)
    write_json(directory.root / "benchmark_metrics.json", summary)  # the same under an older name


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


def code() -> dict[str, Any]:
    """Return what identifies the code of a run: this checkout's commit, and the versions of Python and packages."""
    versions = {"rl_cluster_benchmark": __version__, "python": platform.python_version(), **package_versions()}
    return {"git_commit": git_commit(), "versions": versions}


def git_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, with a + if files were changed; None outside one."""
    here = Path(__file__).parent
    try:
        call = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(call, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def package_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _reward(summary: dict[str, Any], key: str) -> str:
    if summary[key] is None:
        return "no episode has ended yet"
    std = summary.get(f"{key}_std")
    return f"{summary[key]:.2f}" if std is None else f"{summary[key]:.2f} ± {std:.2f}"
