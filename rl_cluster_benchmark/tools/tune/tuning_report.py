"""What tuning found: the table, the sentences, the YAML and the JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.traits import is_sequential
from rl_cluster_benchmark.core.atomic_files import write_atomically, write_json
from rl_cluster_benchmark.core.text import NOTHING, table, timestamp
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.run.provenance import code
from rl_cluster_benchmark.tools.tune.tuning_search import ALIKE
from rl_cluster_benchmark.tools.tune.tuning_space import GROUPS, TuningSetting, TuningSpace
from rl_cluster_benchmark.tools.tune.tuning_trials import TuningTrial

YAML, JSON = "tuned.yaml", "tune.json"
STEADY = 0.1  # half of the range of a setting's trials
ROWS = 20  # of the table on the screen; the JSON has all
LEGEND = """\
steps/s     environment steps per second, median of the trials; +- is half of their range
against     times the speed of the config as it is (marked "as it is")
balance     share of each minibatch that goes to whichever worker is free first
policy lag  gradient steps between the weights that acted and those that learned (IMPALA): what a split changes"""


def name(setting: TuningSetting) -> str:
    """Return a setting in a few words."""
    layout = setting.layout
    if is_sequential(layout.mode):
        who = f"one process x {_count(layout.threads, 'thread')}"
    elif layout.learners:
        who = f"{_count(layout.workers, 'actor')} + {_count(layout.learners, 'learner')}"
    else:
        who = f"{_count(layout.workers, 'worker')} x {_count(layout.threads, 'thread')}"
    balance = f", balance {setting.balance:g}" if setting.balance is not None else ""
    changed = f" [{'; '.join(setting.learning)}]" if setting.learning else ""
    return f"{who}, {setting.precision} {setting.engine}, micro-batch {setting.micro_batch}{balance}{changed}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def result_table(space: TuningSpace, tried: Sequence[TuningTrial], chosen: TuningSetting | None) -> list[str]:
    """Return the table of the trials, the fastest first."""
    own = next((trial.fps for trial in tried if trial.setting == space.default), 0.0)
    is_impala = any(trial.setting.layout.learners for trial in tried)
    who = "actors+learners" if is_impala else "workers"
    head = ["", "steps/s", "+-", "trials", "against", who, "threads", "envs each", "precision", "network"]
    head += ["micro-batch", "policy lag" if is_impala else "balance"]
    rows = []
    for place, trial in enumerate(sorted(tried, key=lambda trial: -trial.fps)[:ROWS], start=1):
        setting, layout = trial.setting, trial.setting.layout
        last = _lag(trial) if is_impala else NOTHING if setting.balance is None else f"{setting.balance:g}"
        who_works = f"{layout.workers}+{layout.learners}" if layout.learners else str(layout.workers)
        marks = [
            "chosen" if setting == chosen else "",
            "as it is" if setting == space.default else "",
            "" if trial.rates else trial.problem or "",
            "; ".join(setting.learning),
        ]
        rows.append(
            [
                str(place),
                f"{trial.fps:,.0f}" if trial.rates else NOTHING,
                f"{trial.spread:.1%}" if len(trial.rates) > 1 else NOTHING,
                str(len(trial.rates)),
                f"{trial.fps / own:.2f}" if own and trial.rates else NOTHING,
                who_works, str(layout.threads), f"{layout.num_envs / layout.workers:g}", setting.precision,
                setting.engine, str(setting.micro_batch), last, ", ".join(filter(None, marks)),
            ]
        )  # fmt: skip
    return table([*head, ""], rows)


def _lag(trial: TuningTrial) -> str:
    lags = [rate.summary["asynchrony"].get("policy_lag") for rate in trial.rates]
    return f"{sum(lags) / len(lags):.1f}" if lags and None not in lags else NOTHING


def what_it_brings(space: TuningSpace, tried: Sequence[TuningTrial], chosen: TuningTrial) -> list[str]:
    """Compare the choice, for each group, with the best of what was tried instead, all else equal."""
    lines = []
    for group in GROUPS:
        variants = set(space.variants(chosen.setting, group))
        others = [trial for trial in tried if trial.setting in variants and trial.rates]
        if others:
            other = max(others, key=lambda trial: trial.fps)
            lines.append(f"  {group:12} {chosen.fps / other.fps:.2f} times {name(other.setting)}")
    return lines


def sentences(space: TuningSpace, tried: Sequence[TuningTrial], chosen: TuningTrial) -> list[str]:
    own = next(trial for trial in tried if trial.setting == space.default)
    measured = sum(bool(trial.rates) for trial in tried)
    lines = [f"Chosen: {name(chosen.setting)}: {chosen.fps:,.0f} steps/s."]
    if measured == 1 < len(space.settings):
        lines.append("That is the config as it is: there was no time for anything else; give it a larger --budget.")
    elif chosen.setting == space.default:
        lines.append(f"That is how the config runs as it is: {_nothing_better(tried, chosen)}")
    elif own.rates:
        lines.append(f"That is {chosen.fps / own.fps:.2f} times the {own.fps:,.0f} of the config as it is.")
    lines.append(f"{measured} of {len(space.settings)} settings were measured.")
    lines.append(learning_sentence(space, chosen.setting))
    if chosen.spread > STEADY:
        lines.append(
            f"Warning: its trials differ by {chosen.spread:.0%} from their middle: something else was running, and the "
            "choice may be chance. Repeat it on a quiet machine."
        )
    return lines


def _nothing_better(tried: Sequence[TuningTrial], chosen: TuningTrial) -> str:
    """Say why nothing else was chosen."""
    faster = [trial for trial in tried if trial.rates and trial.fps > chosen.fps]
    if not faster:
        return "nothing tried was faster."
    best = max(faster, key=lambda trial: trial.fps)
    if chosen.fps >= (1 - ALIKE) * best.fps:
        return f"nothing tried was more than {ALIKE:.0%} faster."
    trials = f"{_count(len(best.rates), 'trial')} against {len(chosen.rates)}"
    return (
        f"{name(best.setting)} came to {best.fps:,.0f} steps/s, but in too few trials to be chosen ({trials}); "
        "give it a larger --budget."
    )


def learning_sentence(space: TuningSpace, setting: TuningSetting) -> str:
    if setting.learning:
        return f"NOTE: it changes what is learned: {'; '.join(setting.learning)}. Compare learning curves."
    training, config = space.config.training, space.tuned(setting)
    traits, batch = config.traits, "a rollout"
    if traits.has_minibatches:
        batch = f"{config.batch_size} samples"
    elif traits.is_lock_free:
        batch = "a worker's rollout"
    elif traits.has_actors:
        batch = f"{config.unrolls_per_step} unrolls"
        if config.unrolls_per_step != space.asked_batch:
            batch += f" (the config asks for {space.asked_batch}, rounded to equal shares of the learners)"
    kept = f"{config.env.num_envs} environments x {training.n_steps} steps, batches of {batch}"
    rest = "rounding" if traits.is_in_step else "rounding and how old experience is when it is used"
    return f"The learning problem is as it was ({kept}); only {rest} may differ."


def record(
    space: TuningSpace, tried: Sequence[TuningTrial], chosen: TuningTrial | None, extra: dict[str, Any]
) -> dict[str, Any]:
    machine = detection.detect()
    return {
        "algorithm": space.config.traits.label,
        "env": space.config.env.name,
        "cpu_model": machine.cpu_model,
        "usable_cores": machine.usable_cores,
        **code(),
        "finished_at": timestamp(),
        "settings_in_space": len(space.settings),
        "chosen": name(chosen.setting) if chosen else None,
        "as_it_is": name(space.default),
        **extra,
        "config": config_files.to_dict(space.config),
        "trials": [
            {
                "name": name(trial.setting),
                "changes": trial.setting.changes,
                "learning_changes": trial.setting.learning,
                "fps": [rate.fps for rate in trial.rates],
                "seconds": [rate.seconds for rate in trial.rates],
                "phase_shares": [rate.shares for rate in trial.rates],
                "problem": trial.problem,
            }
            for trial in sorted(tried, key=lambda trial: -trial.fps)
        ],
    }


def write_files(
    folder: Path, space: TuningSpace, tried: Sequence[TuningTrial], chosen: TuningTrial, extra: dict[str, Any]
) -> None:
    own = next((trial.fps for trial in tried if trial.setting == space.default), 0.0)
    against = f", {chosen.fps / own:.2f} times the {own:,.0f} of the config as it was" if own else ""
    machine = detection.detect()
    made_by = code()
    commit = f", commit {made_by['git_commit']}" if made_by["git_commit"] else ""
    head = [
        f"# Found by `rlcb tune` on {datetime.date.today().isoformat()}: {name(chosen.setting)}",
        f"# {chosen.fps:,.0f} steps/s{against}",
        f"# on {machine.cpu_model}, {machine.usable_cores} cores. {learning_sentence(space, chosen.setting)}",
        f"# rlcb {made_by['versions']['rl_cluster_benchmark']}{commit}",
    ]
    text = "\n".join(head) + "\n" + config_files.to_yaml(space.tuned(chosen.setting))
    write_atomically(folder / YAML, text.encode())
    write_json(folder / JSON, record(space, tried, chosen, extra))
