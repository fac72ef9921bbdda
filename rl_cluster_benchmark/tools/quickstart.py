"""`rlcb quickstart`: a first look at everything, in about two minutes."""

from __future__ import annotations

from pathlib import Path

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import MARK_OF_PLOTS, check_own
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.evaluation.evaluate import Result, evaluate
from rl_cluster_benchmark.tools.reports.plots import plot_metrics
from rl_cluster_benchmark.training.training import train

EPISODES = 100


def quickstart(config: Config, signals: Signals, *, overwrite: bool) -> int:
    """Train, evaluate and plot; an earlier quickstart is replaced unasked, any other run is not."""
    directory = RunDirectory.of(config)
    picture = directory.root / "learning_curve.png"
    check_own(picture, MARK_OF_PLOTS, "choose another --output-dir")
    status = train(config, signals, overwrite=overwrite or _holds_a_quickstart(directory, config))
    if status != 0:
        return status
    signals.restore()
    state = checkpoint.load(directory.final_checkpoint())
    print(f"\nPlaying {EPISODES} episodes each on {config.env.num_levels} training levels and on unseen levels ...")
    agents = {"trained agent": state, "random policy": None}
    results = {
        (name, levels): evaluate(config, agent, num_episodes=EPISODES, levels=levels)
        for name, agent in agents.items()
        for levels in ("train", "test")
    }
    print("\n".join(_table(list(agents), results)))
    plot_metrics(directory.metrics_log, picture)
    print("\n".join(_what_next(config, directory, picture)))
    return 0


def _holds_a_quickstart(directory: RunDirectory, config: Config) -> bool:
    """Return whether the run there learns the same, and no longer than a quickstart does."""
    try:
        there = config_files.load(directory.config, config_files.AS_IT_WAS)
    except UserError:
        return False
    hours, longest = there.training.duration_hours, config_files.load("quickstart").training.duration_hours
    is_alike = _what_is_learned(there) == _what_is_learned(config)
    is_short = hours is not None and hours <= max(longest or 0.0, config.training.duration_hours or 0.0)
    return is_alike and is_short


def _what_is_learned(config: Config) -> list[object]:
    training = config.training.model_dump(exclude={"duration_hours"})
    return [config.algorithm, config.mode, config.env, config.model, training]


def _table(agents: list[str], results: dict[tuple[str, str], Result]) -> list[str]:
    def cell(result: Result) -> str:
        return f"{result.mean_reward:5.2f} ({result.ci95[0]:.2f} to {result.ci95[1]:.2f})"

    rows = [f"{name:<16}{cell(results[name, 'train']):<24}{cell(results[name, 'test'])}" for name in agents]
    head = f"{'Mean reward':<16}{'training levels (95%)':<24}unseen levels (95%)"
    return ["", head, "-" * 64, *rows]


def _what_next(config: Config, directory: RunDirectory, picture: Path) -> list[str]:
    return [
        "",
        f"Learning curve:  {picture}",
        f"Summary:         {directory.summary}",
        f"Trained agent:   {directory.final_checkpoint()}",
        "",
        "A minute is enough to see it learn, not to play well. Next:",
        "  venv/bin/rlcb train --mode parallel --env coinrun --duration 1 --output-dir runs/coinrun  # for an hour",
        f"  venv/bin/rlcb evaluate --checkpoint {directory.final_checkpoint()} --video agent.gif",
        f"  venv/bin/tensorboard --logdir {directory.root / 'logs'}",
        "  venv/bin/rlcb --help",
    ]
