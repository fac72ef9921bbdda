"""The runs of a report one by one: clips of their agents, configs, and the commands that repeat them."""

from __future__ import annotations

import base64
import shlex

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.evaluations import load_clip
from rl_cluster_benchmark.tools.analysis.groups import Group
from rl_cluster_benchmark.tools.analysis.run_files import UnusableRunError
from rl_cluster_benchmark.tools.analysis.runs import RunRecord

MAX_CLIPS = 24  # on a page


def clips(comparison: Comparison) -> list[dict[str, str]]:
    """Return one clip for each group: that of its first seed that has one."""
    clips = []
    for group in comparison.groups:
        for run in group.runs:
            source = _clip(run)
            if source is not None:
                caption = f"{group.variant}, {group.task.game}, seed {run.seed}"
                clips.append({"source": source, "caption": caption})
                break
    return clips[:MAX_CLIPS]


def _clip(run: RunRecord) -> str | None:
    try:
        found = load_clip(run.path, run.config, run.summary)
    except UnusableRunError:
        return None  # it is named among what was left out
    return f"data:{found[0]};base64,{base64.b64encode(found[1]).decode()}" if found else None


def run_entry(run: RunRecord, color: str, group: Group) -> dict[str, str]:
    summary = run.summary
    facts = {
        "directory": str(run.path),
        "finished": summary.finished_at,
        "commit": summary.git_commit,
        **summary.versions,
    }
    return {
        "name": f"{group.variant}, {run.game}, seed {run.seed}",
        "color": color,
        "state": run.state if run.reason is None else f"{run.state} ({run.reason})",
        "facts": ", ".join(f"{name} {value}" for name, value in facts.items() if value),
        "commands": "\n".join(commands(run)),
        "config": configs.to_yaml(run.config),
    }


def commands(run: RunRecord) -> list[str]:
    """Return the commands that repeat the run and its evaluations."""
    again = run.path.with_name(f"{run.path.name}_again")
    directory = RunDirectory.of(run.config.model_copy(update={"output_dir": str(again)}))
    lines = [shlex.join(["rlcb", "train", "--config", str(run.path / "config.yaml"), "--output-dir", str(again)])]
    for levels, evaluation in run.evaluations.items():
        call = ["rlcb", "evaluate", "--checkpoint", str(directory.final_checkpoint()), "--levels", levels]
        call += ["--num-episodes", str(evaluation.num_episodes), "--seed", str(evaluation.seed)]
        lines.append(shlex.join([*call, *(["--deterministic"] if evaluation.deterministic else [])]))
    return lines
