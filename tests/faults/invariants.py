"""What holds of a run directory whatever was done to the run: one function that checks it."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from harness import EPISODE, N_STEPS, NUM_ENVS, Mode

from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.checkpoint import DamagedCheckpointError, all_finite
from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis.run_files import UnusableRunError
from rl_cluster_benchmark.tools.analysis.runs import load_run


def check(output: Path, mode: Mode, *, starts: int, history: dict[str, Any]) -> None:
    """Of a run that has come to its end after so many starts; `history` is kept from one check to the next."""
    lines = [json.loads(line) for line in (output / "logs" / mode.label / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "training_summary.json").read_text())
    final = checkpoint.load(output / "checkpoints" / f"{mode.algorithm}_{mode.mode}_final.pt")

    # metrics.jsonl has no torn, lost or repeated line
    assert [line["update"] for line in lines] == list(range(1, summary["total_updates"] + 1))
    for before, after in itertools.pairwise(lines):
        assert before["step"] < after["step"]
        assert before["time"] <= after["time"]
        assert before["charts/episodes"] <= after["charts/episodes"]
    columns = json.loads((output / "metrics.json").read_text())
    assert columns["step"] == [line["step"] for line in lines]

    # total_timesteps counts each environment step once. An episode takes nine of them: more steps than its episodes
    # account for can only belong to episodes that were open when a start ended, fewer (IMPALA: whose episodes are told
    # before they are learned from) to unrolls on their way.
    steps = summary["total_timesteps"]
    assert steps == lines[-1]["step"] == final["progress"]["steps"]
    assert all(after["step"] - before["step"] <= _most_per_update(mode) for before, after in itertools.pairwise(lines))
    open_at_most = starts * NUM_ENVS * (EPISODE - 1)
    on_their_way = starts * 4 * NUM_ENVS * N_STEPS if mode.algorithm == "impala" else 0
    in_episodes = EPISODE * summary["num_episodes"]
    assert in_episodes - on_their_way <= steps <= in_episodes + open_at_most + on_their_way

    # best and final rewards are those of the whole history
    assert summary["final_reward"] == pytest.approx(lines[-1]["charts/episodic_return"])
    seen = [line["charts/episodic_return"] for line in lines if line["charts/episodes"] >= WINDOW]
    assert summary["best_reward"] >= max(seen, default=-1.0) - 1e-9
    assert summary["num_episodes"] == lines[-1]["charts/episodes"]
    if "initial_reward" in history:
        assert summary["initial_reward"] == history["initial_reward"]
    if lines[-1]["charts/episodes"] >= WINDOW:
        history["initial_reward"] = summary["initial_reward"]

    # nothing half-written is left, nothing bad was saved
    assert not list(output.rglob("*.tmp"))
    assert all_finite(final["model"])
    assert all_finite(final["algorithm"])


def _most_per_update(mode: Mode) -> int:
    workers = 2 if mode.algorithm == "a3c" else 1  # the last report may be of fewer
    return workers * NUM_ENVS * N_STEPS


def check_ended(output: Path, state: str) -> None:
    """After an end in good order: nothing at all is lost, and the summary tells of what is there."""
    summary = json.loads((output / "training_summary.json").read_text())
    (log,) = output.glob("logs/*/metrics.jsonl")
    steps = checkpoint.load(newest_checkpoint(output))["progress"]["steps"]
    assert summary["state"] == state
    assert summary["total_timesteps"] == steps
    assert json.loads(log.read_text().splitlines()[-1])["step"] == steps


def check_origin(output: Path, *, evaluated: bool = False) -> None:
    """After any disturbance: no evaluation that is shown is of another agent than the run's newest."""
    try:
        run = load_run(output)
    except UnusableRunError:  # it was killed before it wrote anything
        assert not evaluated
        return
    assert run.evaluations or not evaluated, run.left_out
    for evaluation in run.evaluations.values():
        assert evaluation.origin is not None
        assert evaluation.origin.checkpoint.digest == newest_checkpoint(output).read_bytes()[-32:].hex()


def newest_checkpoint(output: Path) -> Path:
    return max((output / "checkpoints").glob("*.pt"), key=lambda file: checkpoint.load(file)["progress"]["steps"])


def content(output: Path) -> set[tuple[str, int]]:
    """The files that a run has written, by name and inode; its lock and files that are being written are none."""
    files = [file for file in output.rglob("*") if file.name != ".lock" and file.suffix != ".tmp"]
    found = set()
    for file in files:
        with contextlib.suppress(OSError):
            if file.is_file():
                found.add((str(file), file.stat().st_ino))
    return found


def check_newest(output: Path, history: dict[str, Any]) -> int:
    """After any disturbance: the newest good checkpoint is there, and no older than any that was seen before."""
    steps = [0]
    for file in (output / "checkpoints").glob("*.pt"):
        try:
            steps.append(checkpoint.load(file)["progress"]["steps"])
        except DamagedCheckpointError as error:
            raise AssertionError(f"a kill damaged a checkpoint: {error}") from None
    assert max(steps) >= history.get("newest", 0), "the newest good checkpoint was deleted"
    history["newest"] = max(steps)
    return max(steps)


def check_torn(output: Path, mode: Mode) -> None:
    """After any disturbance: only the last line of the log can be incomplete."""
    log = output / "logs" / mode.label / "metrics.jsonl"
    if log.exists():
        for line in log.read_text().splitlines()[:-1]:
            json.loads(line)
