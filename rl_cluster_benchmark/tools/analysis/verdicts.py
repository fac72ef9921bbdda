"""Who is ahead, in plain words: nobody, where the intervals overlap; nobody for certain, where there is one seed."""

from __future__ import annotations

from dataclasses import dataclass

from rl_cluster_benchmark.core.text import NOTHING
from rl_cluster_benchmark.tools.analysis import groups as figures
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.statistics import ONE_SEED, Estimate


@dataclass(frozen=True)
class Ranking:
    """The variants from the highest figure to the lowest."""

    order: list[tuple[str, Estimate]]
    tied: list[str]  # others whose interval overlaps that of the first
    certain: bool  # every one has an interval that holds

    @property
    def winner(self) -> str | None:
        return self.order[0][0] if self.certain and not self.tied and len(self.order) > 1 else None


def rank(estimates: dict[str, Estimate], enough_seeds: bool = True) -> Ranking:
    order = sorted(estimates.items(), key=lambda item: -item[1].value)
    tied = [name for name, estimate in order[1:] if order[0][1].overlaps(estimate)]
    return Ranking(order, tied, enough_seeds and all(e.interval is not None for _, e in order))


def interval(estimate: Estimate | None, places: int = 2) -> str:
    """Return `5.90 (5.20 to 6.60)`; without an interval the figure alone."""
    if estimate is None:
        return NOTHING
    value = f"{estimate.value:,.{places}f}"
    if estimate.interval is None:
        return value
    low, high = estimate.interval
    return f"{value} ({low:,.{places}f} to {high:,.{places}f})"


def headline(comparison: Comparison) -> list[str]:
    """Return the answer in a few sentences: how fast, how good, and whether it can be trusted."""
    sentences = []
    speeds = rank(comparison.speeds(), comparison.enough_seeds)
    if len(comparison.machines()) > 1:
        sentences.append("Speeds are not compared: the runs come from different machines.")
    elif speeds.order:
        sentences.append(_speed_sentence(speeds))
    rewards = rank(comparison.rewards(), comparison.enough_seeds)
    if rewards.order:
        sentences.append(_reward_sentence(rewards, comparison))
    gaps = [(g, e) for g in comparison.groups if (e := g.estimate(figures.gap)) is not None]
    if gaps:
        mean = sum(estimate.value for _, estimate in gaps) / len(gaps)
        sentences.append(f"On levels they were trained on, agents score {mean:+.2f} compared with unseen ones.")
    return sentences


def _speed_sentence(ranking: Ranking) -> str:
    first, best = ranking.order[0]
    text = f"{first} at {interval(best, 0)} environment steps per second"
    if len(ranking.order) == 1:
        return f"{text[0].upper()}{text[1:]}{_remark(best)}."
    last, worst = ranking.order[-1]
    ratio = best.value / worst.value if worst.value > 0 else float("nan")
    if ranking.winner:
        return f"Fastest: {text}, {ratio:.2f} times {last}."
    if not ranking.certain:
        return f"Highest speed: {text}, {ratio:.2f} times {last} ({_too_few(best)})."
    return f"No winner in speed: the intervals of {_and([first, *ranking.tied])} overlap; highest is {text}."


def _reward_sentence(ranking: Ranking, comparison: Comparison) -> str:
    assert comparison.basis is not None
    where = comparison.basis[1]
    unit = "a mean reward of" if len(comparison.common_tasks) == 1 else "an interquartile mean score of"
    first, best = ranking.order[0]
    text = f"{first} with {unit} {interval(best)} ({where})"
    if len(ranking.order) == 1:
        return f"{text}{_remark(best)}."
    if ranking.winner:
        return f"Learned most: {text}."
    if not ranking.certain:
        return f"Highest reward: {text}; {_too_few(best)}, so no winner is named."
    return f"No winner in reward: the intervals of {_and([first, *ranking.tied])} overlap; highest is {text}."


def _too_few(estimate: Estimate) -> str:
    return ONE_SEED if estimate.interval is None else "too few seeds"


def _remark(estimate: Estimate) -> str:
    return f" ({ONE_SEED})" if estimate.interval is None else ""


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
