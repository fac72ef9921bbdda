"""What a search found: the table, the best config, the CSV and the two pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.core.output_files import MARK_OF_PLOTS, check_own
from rl_cluster_benchmark.tools.reports.plots import open_figure, save_figure
from rl_cluster_benchmark.tools.search.sampling import FEWEST_FOR_IMPORTANCES, TOP, importances
from rl_cluster_benchmark.tools.search.search_space import SearchSpace
from rl_cluster_benchmark.tools.search.study import Study, Trial

BEST, CSV, HISTORY, IMPORTANCES = "best.yaml", "trials.csv", "history.png", "importances.png"
ROWS = 20  # of the table on the screen; the CSV has all
LONGEST_REASON = 80
TITLE = "of `rlcb search`: score"
MARKS = {BEST: TITLE.encode(), CSV: b"trial,state,score,", HISTORY: MARK_OF_PLOTS, IMPORTANCES: MARK_OF_PLOTS}


def check_replaceable(directory: Path) -> None:
    """Refuse a directory where the results would replace a file that this program has not written."""
    for name, mark in MARKS.items():
        check_own(directory / name, mark, "move it away, or choose another --output-dir")


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials, best first: by score, then those that were stopped, the latest first, then the rest."""
    order = {"complete": 0, "pruned": 1, "running": 2, "failed": 3}
    return sorted(
        trials, key=lambda trial: (order[trial.state], -len(trial.rungs) if trial.score is None else 0,
                                   -(trial.last_value() or 0.0), trial.number),
    )  # fmt: skip


def settings_of(trial: Trial) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {_short(value)}" for key, value in trial.params.items())


def sentence(trial: Trial, space: SearchSpace) -> str:
    """Return how a trial ended."""
    took = f" ({text.duration(trial.seconds)})"
    if trial.state == "failed":
        return f"Trial {trial.number} failed: {trial.reason}{took}"
    if trial.state == "pruned":
        return f"Trial {trial.number} was stopped at {max(trial.rungs):,} steps with {trial.last_value():.3f}{took}"
    means = ", ".join(f"{name} {value:.2f}" for name, value in trial.returns.items())
    return f"Trial {trial.number}: score {trial.score:.3f} ({means}){took}"


def write(study: Study) -> list[str]:
    """Write all files; return the lines to print: the table, what was written. The caller holds the study's lock."""
    trials = study.trials()
    done = [trial for trial in trials if trial.state != "running"]
    if not done:
        return ["No trial has ended yet: no results are written."]
    names = write_tables(study)
    lines = ["", *_table(study.space, trials), ""]
    names.append(_draw_history(study, trials))
    found = importances(study.space, done)
    if found is None:
        lines.append(
            f"There are too few trials to say which parameters matter: {FEWEST_FOR_IMPORTANCES} are needed that reach "
            f"{f'{study.space.prune[0].at:,} steps' if study.space.prune else 'their end'}."
        )
    else:
        names.append(_draw_importances(study, found))
        shares = ", ".join(f"{key} {share:.0%}" for key, share in found.items())
        lines.append(f"What decides whether a trial is among the best {TOP:.0%}: {shares}.")
    others = sum(trial.state == "running" for trial in trials)
    if others:
        lines.append(
            f"{others} trial{' has' if others == 1 else 's have'} not ended: in hand elsewhere, or left unfinished."
        )
    if not any(trial.state == "complete" for trial in trials):
        lines.append(f"No trial has come to its end: there is no {BEST}.")
    elif BEST not in names:
        lines.append(f"{BEST} was edited and stays as it is: its trial is still the best.")
    return [*lines, f"Saved {', '.join(str(study.directory / name) for name in names)}"]


def write_tables(study: Study) -> list[str]:
    """Write trials.csv and, once there is one, the best config; return their names. The caller holds the lock."""
    trials = study.trials()
    write_atomically(study.directory / CSV, as_csv(study.space, trials).encode())
    best = next((trial for trial in ranked(trials) if trial.state == "complete"), None)
    if best is None:
        return [CSV]
    config = configs.to_yaml(study.space.config_of(best.params))
    title = f"# Trial {best.number} {TITLE} {best.score:.4f}, the best of "
    if _was_edited(study.directory / BEST, title, config):
        return [CSV]
    lines = [
        f"{title}{sum(trial.state == 'complete' for trial in trials)} trials that came to their end.",
        f"# Mean returns: {', '.join(f'{name} {value:.2f}' for name, value in best.returns.items())}.",
        "# To train with it on another game: rlcb train --config FILE --env GAME --seed N --output-dir DIR",
    ]
    write_atomically(study.directory / BEST, ("\n".join(lines) + "\n" + config).encode())
    return [BEST, CSV]


def _was_edited(file: Path, title: str, config: str) -> bool:
    """Return whether the file is of the same trial, and somebody has changed its config."""
    there = file.read_text(errors="replace") if file.is_file() else ""
    return there.startswith(title) and not there.endswith(f"\n{config}")


def as_csv(space: SearchSpace, trials: Sequence[Trial]) -> str:
    """Return all trials, best first: state, score, score at each rung, mean return of each run, parameters."""
    rows = [
        {
            "trial": trial.number,
            "state": trial.state,
            "score": trial.score,
            **{f"score_at_{rung.at}": trial.rungs.get(rung.at) for rung in space.prune},
            **{f"return_{name}": trial.returns.get(name) for name in space.runs()},
            "seconds": f"{trial.seconds:.1f}",
            "is_candidate": trial.is_candidate,
            **{key: _csv_value(trial.params[key]) if key in trial.params else "" for key in space.space},
            "reason": trial.reason,
        }
        for trial in ranked(trials)
    ]
    return text.as_csv(rows)


def _csv_value(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value)


def _table(space: SearchSpace, trials: Sequence[Trial]) -> list[str]:
    runs = list(space.runs())
    head = ["trial", "score", *runs, *(key.rpartition(".")[2] for key in space.space), "time", ""]
    rows = []
    for trial in ranked(trials)[:ROWS]:
        note = {"complete": "candidate" if trial.is_candidate else "", "running": "not ended"}.get(trial.state, "")
        if trial.state == "pruned":
            note = f"stopped at {max(trial.rungs):,} with {trial.last_value():.3f}"
        elif trial.state == "failed":
            note = f"failed: {(trial.reason or '')[:LONGEST_REASON]}"
        rows.append(
            [
                str(trial.number),
                text.decimal(trial.score, 3),
                *(text.decimal(trial.returns.get(name)) for name in runs),
                *(_short(trial.params[key]) if key in trial.params else text.NOTHING for key in space.space),
                text.duration(trial.seconds),
                note,
            ]
        )
    more = [f"... and {len(trials) - ROWS} more in {CSV}"] if len(trials) > ROWS else []
    return [*text.table(head, rows), *more]


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _draw_history(study: Study, trials: Sequence[Trial]) -> str:
    """Draw every trial's score, and the best so far."""
    figure, axes = open_figure(1, 1, figsize=(9, 5))
    axis = axes[0, 0]
    complete = [trial for trial in trials if trial.state == "complete"]
    pruned = [trial for trial in trials if trial.state == "pruned"]
    failed = [trial for trial in trials if trial.state == "failed"]
    axis.plot([t.number for t in complete], [t.score for t in complete], "o", color="tab:blue", label="came to its end")
    if pruned:
        values = [trial.last_value() for trial in pruned]
        axis.plot([t.number for t in pruned], values, "x", color="gray", label="stopped early: score at that point")
    for trial in failed:
        axis.axvline(trial.number, color="tab:red", alpha=0.3, label="failed" if trial is failed[0] else None)
    best: list[float] = []
    for trial in complete:
        assert trial.score is not None
        best.append(max(trial.score, best[-1]) if best else trial.score)
    axis.step([t.number for t in complete], best, where="post", color="tab:orange", label="best so far")
    axis.set(xlabel="trial", ylabel="score", title="Scores of the trials")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    save_figure(figure, study.directory / HISTORY)
    return HISTORY


def _draw_importances(study: Study, found: dict[str, float]) -> str:
    """Draw a bar for each parameter, the most important on top."""
    figure, axes = open_figure(1, 1, figsize=(9, 1.5 + 0.35 * len(found)))
    axis = axes[0, 0]
    names = list(found)[::-1]
    axis.barh(names, [found[name] for name in names], color="tab:blue")
    axis.set(xlabel="share", title=f"What decides whether a trial is among the best {TOP:.0%}", xlim=(0, None))
    axis.grid(alpha=0.3, axis="x")
    save_figure(figure, study.directory / IMPORTANCES)
    return IMPORTANCES
