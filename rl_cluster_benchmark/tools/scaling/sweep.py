"""The sweep: for each number of workers, all of them together and as many independent runs, in turns."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.core.text import timestamp
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.scaling import results
from rl_cluster_benchmark.tools.scaling.cases import Case, choose_counts, make_cases
from rl_cluster_benchmark.tools.scaling.measured_runs import measure_in_turns
from rl_cluster_benchmark.tools.scaling.results import Round
from rl_cluster_benchmark.tools.scaling.results_folder import results_folder

COPIED_FROM_RUN = ("algorithm", "env", "precision", "engine", "cpu_model", "git_commit", "versions")


@dataclass(frozen=True)
class SweepSettings:
    workers: Sequence[int] | None  # None: powers of two up to the usable cores
    envs_per_worker: int | None  # None: the total stays the same
    seconds: float
    repeats: int
    output_dir: Path
    overwrite: bool


def scaling(config: Config, settings: SweepSettings, signals: Signals) -> int:
    """Measure, print, write; return the exit status."""
    machine = detection.detect()
    counts, skipped = choose_counts(settings.workers, machine)
    sweep = Sweep(config, settings, signals, make_cases(config, counts, settings.envs_per_worker, machine))
    with results_folder(settings.output_dir, results.FILES, overwrite=settings.overwrite, what="a sweep") as folder:
        print("\n".join(_header(config, sweep.cases, settings)), flush=True)
        if skipped:
            print(
                f"Skipped, for there are {machine.usable_cores} usable cores: {_listed(skipped)} workers.", flush=True
            )
        try:
            with contextlib.suppress(KeyboardInterrupt):
                sweep.measure(folder)
        finally:
            sweep.show()
    return signals.status


@dataclass
class Sweep:
    config: Config
    settings: SweepSettings
    signals: Signals
    cases: list[Case]
    rounds: list[list[Round]] = field(init=False)  # of each case

    def __post_init__(self) -> None:
        self.rounds = [[] for _ in self.cases]

    def measure(self, folder: Path) -> None:
        """Measure every case in every round. What is finished is on the disk at once, however the sweep ends."""
        for repeat in range(self.settings.repeats):
            for case, measured in zip(self.cases, self.rounds, strict=True):
                measured.append(self._measure(case, folder, reverse=repeat % 2 == 1))
                round_of = f", round {repeat + 1} of {self.settings.repeats}" if self.settings.repeats > 1 else ""
                print(f"{_workers(case.workers)}{round_of}: {_line(measured[-1])}", flush=True)
                results.write_files(self.settings.output_dir, self._record())

    def _measure(self, case: Case, folder: Path, *, reverse: bool) -> Round:
        """Measure a case; in every other round the independent runs begin, so that a drift favours neither way."""
        all_cores = [set(case.cores)]  # it pins its workers itself
        together = ([case.together], all_cores, folder / "together")
        independent = (case.independents, case.core_sets(), folder / "independent")
        ways = [independent, together] if reverse else [together, independent]
        rates = measure_in_turns(ways, seconds=self.settings.seconds, interrupted=self.signals.has_come)
        for _, _, place in ways:
            shutil.rmtree(place)
        return Round(rates[reverse][0], rates[not reverse])

    def show(self) -> None:
        """Print what has been measured, if anything has."""
        if rows := results.make_rows(self.cases, self.rounds):
            notes = [results.verdict(rows)]
            if warning := results.disturbed(rows):
                notes.append(warning)
            print("", results.table(rows), "", *notes, "", results.LEGEND, "", sep="\n")
            print(f"Saved {', '.join(str(self.settings.output_dir / name) for name in results.FILES)}", flush=True)

    def _record(self) -> dict[str, Any]:
        run = self.rounds[0][0].together.summary
        return {
            **{key: run[key] for key in COPIED_FROM_RUN},
            "scaling": "strong" if self.settings.envs_per_worker is None else "weak",
            "complete": all(len(measured) == self.settings.repeats for measured in self.rounds),
            "usable_cores": detection.detect().usable_cores,
            "pinned": self.cases[0].pinned,
            "seconds": self.settings.seconds,
            "repeats": self.settings.repeats,
            "finished_at": timestamp(),
            "rows": results.make_rows(self.cases, self.rounds),
            "config": config_files.to_dict(self.config),
        }


def _header(config: Config, cases: Sequence[Case], settings: SweepSettings) -> list[str]:
    first = cases[0]
    if settings.envs_per_worker is None:
        kind = f"strong: {first.num_envs} environments in all, shared by the workers; the same learning problem for all"
    else:
        kind = f"weak: {first.num_envs} environments for each worker; the learning problem grows with the workers"
    pinned = "pinned to cores" if first.pinned else "not pinned"
    times = f", {settings.repeats} times" if settings.repeats > 1 else ""
    return [
        f"Scaling of {config.traits.label} on {config.env.name}: "
        f"{_listed([case.workers for case in cases])} workers, {pinned}",
        f"CPU: {detection.detect()}",
        f"Kind: {kind}",
        f"For each: all workers together, and as many independent runs side by side, in turns; {settings.seconds:g} s "
        f"(at least an update) after the first update{times}",
    ]


def _line(measured: Round) -> str:
    together = measured.together
    return (
        f"together {together.fps:,.0f} FPS ({together.updates} updates in {together.seconds:.1f} s), "
        f"independent {measured.independent_fps:,.0f} FPS, ratio {measured.of_machine:.1%}"
    )


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
