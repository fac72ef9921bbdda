"""This project: `rlcb train --mode parallel`, its metrics passed on as they are written.

Keeps out of the way of the run it measures: nothing heavy is imported before that has ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from job import NORMALISED, NUM_LEVELS, RAW, Job, Report, arguments
from rl_cluster_benchmark.processes.pool import die_with_parent

PRESETS = {"ppo": "ppo_procgen_paper", "a2c": "a2c_parallel", "impala": "impala_procgen"}
SECONDS_BETWEEN_LOOKS = 0.2


def command(job: Job, precision: str, seconds: float | None, folder: Path) -> list[str]:
    settings = {
        "env.num_levels": NUM_LEVELS, "env.start_level": 0, "env.distribution_mode": "easy",
        "training.n_steps": job.n_steps, "training.n_epochs": job.epochs, "training.gamma": job.gamma,
        "training.normalize_reward": True, "training.log_interval": 1,
        "training.save_interval": 1 if job.minibatches * job.epochs > 1 else 10**9,
        "training.total_timesteps": 10**9, "logging.checkpoint_minutes": 10**6, "logging.tensorboard": False,
        "hardware.precision": precision,
    }  # fmt: skip
    call = [
        sys.executable,
        "-m",
        "rl_cluster_benchmark",
        "train",
        "--config",
        PRESETS[job.algorithm],
        "--mode",
        "parallel",
    ]
    call += ["--env", "coinrun", "--seed", str(job.seed), "--num-envs", str(job.num_envs)]
    call += ["--batch-size", str(job.batch_size), "--output-dir", str(folder)]
    call += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return call if seconds is None else [*call, "--duration", str(seconds / 3600)]


def follow(process: subprocess.Popen[bytes], folder: Path, report: Report) -> None:
    """Pass on its metrics until it ends. Their times count from its start, which is known when the first is seen."""
    position, began = 0, None
    while process.poll() is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for log in folder.glob("logs/*/metrics.jsonl"):
            with log.open("rb") as file:
                file.seek(position)
                whole, newline, _ = file.read().rpartition(b"\n")
            position += len(whole) + len(newline)
            for values in map(json.loads, whole.splitlines()):
                if began is None:
                    began = time.monotonic() - values["time"]
                    report.update(0, at=began)
                report.update(values["step"], at=began + values["time"])


def main() -> int:
    args = arguments()
    job: Job = args.job
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parent = os.getpid()
        call = command(job, args.precision, args.seconds, folder)
        process = subprocess.Popen(call, preexec_fn=lambda: die_with_parent(parent))

        def stop(*_: int | FrameType | None) -> None:
            process.terminate()

        signal.signal(signal.SIGTERM, stop)
        follow(process, folder, args.report)
        if process.returncode not in (0, 128 + signal.SIGTERM):
            return process.returncode or 1
        saved = sorted(folder.glob("checkpoints/*.pt"), key=lambda file: file.stat().st_mtime)
        tell(folder, saved[-2:][0], args.report)  # the last may stand in the middle of an update
        if args.save is not None:
            shutil.copy(saved[-1], args.save)
    return 0


def tell(folder: Path, saved: Path, report: Report) -> None:
    """What the run itself has counted and used."""
    from rl_cluster_benchmark.config import config_files
    from rl_cluster_benchmark.run import checkpoint

    state = checkpoint.load(saved)
    summary = json.loads((folder / "training_summary.json").read_text())
    env, training = state["config"]["env"], state["config"]["training"]
    game = env["name"].removeprefix("procgen-").removesuffix("-v0")
    learners = summary["num_learners"]
    processes = (
        f"actors: {summary['num_workers']}, learners: {learners}" if learners else f"workers: {summary['num_workers']}"
    )
    steps, optimizer_steps = state["progress"]["steps"], int(state["algorithm"]["optimizer"]["steps"])
    samples = training["batch_size"]
    if learners:  # IMPALA takes whole unrolls, as many for each learner
        config = config_files.build(state["config"], {}, source="checkpoint")
        samples = config.unrolls_per_step * config.training.n_steps
    report.facts(
        parameters=sum(tensor.numel() for tensor in state["model"].values()),
        optimizer_steps_per_step=optimizer_steps / steps,
        samples_per_step=optimizer_steps * samples / steps,  # with the frames after resets, which are masked
        num_envs=env["num_envs"],
        levels=f"{game} {env['distribution_mode']}, {env['num_levels']} from {env['start_level']}",
        reward=NORMALISED if training["normalize_reward"] else RAW,
        precision=summary["precision"],
        setting=f"{processes}, {summary['engine']} network",
        versions=summary["versions"],
    )


if __name__ == "__main__":
    sys.exit(main())
