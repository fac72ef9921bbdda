"""A study on the disk: its space, and a file for each trial that several processes share.

Every trial is one small file, replaced whole, and who works on a trial holds a lock that the kernel takes away when the
process ends, however it ends. A trial that is neither ended nor locked was left by a process that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from rl_cluster_benchmark.core.atomic_files import remove_leftovers, write_atomically
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import cannot_write_to
from rl_cluster_benchmark.run.directory import LOCK, lock_file
from rl_cluster_benchmark.tools.analysis.run_files import first_problem
from rl_cluster_benchmark.tools.analysis.runs import is_run, is_running
from rl_cluster_benchmark.tools.search import space_files
from rl_cluster_benchmark.tools.search.search_space import Params, SearchSpace

SPACE, TRIALS, TRIAL, SETTINGS = "search.yaml", "trials", "trial.json", "settings.yaml"
STUDY_LOCK = ".search.lock"
PATIENCE = 600.0  # seconds to wait for other processes, each of which holds the study's lock for a moment


class Trial(BaseModel):
    """What is known of a trial; trial.json holds it."""

    number: int
    state: Literal["running", "complete", "pruned", "failed"] = "running"
    params: Params
    is_candidate: bool = False
    rungs: dict[int, float] = {}  # steps -> score there
    returns: dict[str, float] = {}  # run -> mean return at the end of it
    score: float | None = None  # of a complete trial
    reason: str | None = None  # of a failed one
    seconds: float = 0.0

    def first_value(self, space: SearchSpace) -> float | None:
        """Return the score after as many steps as all trials make, if they are not stopped or fail before."""
        return self.rungs.get(space.prune[0].at) if space.prune else self.score

    def last_value(self) -> float | None:
        return self.score if self.score is not None else self.rungs[max(self.rungs)] if self.rungs else None


@dataclass(frozen=True)
class TrialClaim:
    """A trial that this process works on, and the lock that says so."""

    trial: Trial
    lock: int
    was_left: bool  # by a process that is gone

    def release(self) -> None:
        os.close(self.lock)


class Study:
    """A search in a directory, which several processes may work on."""

    def __init__(self, directory: Path, space: SearchSpace) -> None:
        self.directory, self.space = directory, space

    @classmethod
    def open(cls, directory: Path, space: SearchSpace | None) -> Study:
        """Return the study in the directory, begun if there is none; refuse a space that is not the study's."""
        file = directory / SPACE
        if space is None:
            if not file.is_file():
                raise UserError(f"There is no search in {directory} to go on with; add --space FILE to begin one.")
            return cls(directory, space_files.load(file))
        if is_run(directory) or (directory / "config.yaml").exists():
            raise UserError(f"{directory} holds a run; choose another --output-dir.")
        study = cls(directory, space)
        with study.locked():
            study._check_locks()
            if file.is_file():
                if (other := _first_difference(space_files.load(file), space)) is not None:
                    raise UserError(
                        f"{directory} holds a search of another space: {other}. Choose another --output-dir, or leave "
                        "--space out to go on with that search."
                    )
            elif any(directory.glob(f"{TRIALS}/*/*")):
                raise UserError(
                    f"{directory} holds {TRIALS}, but no {SPACE} that says what they are; choose another --output-dir."
                )
            else:
                (directory / TRIALS).mkdir(exist_ok=True)
                write_atomically(file, _as_yaml(space).encode())
        return study

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the study's lock: while a trial is chosen, and while results are written."""
        try:
            lock = lock_file(self.directory / STUDY_LOCK, patience=PATIENCE)
        except OSError as error:
            raise cannot_write_to(self.directory, error) from None
        if lock is None:
            raise UserError(
                f"Another process has held {self.directory / STUDY_LOCK} for {PATIENCE:.0f} seconds; end it."
            )
        try:
            yield
        finally:
            os.close(lock)

    def _check_locks(self) -> None:
        """Refuse a filesystem without locks: two processes could take the same trial."""
        second = lock_file(self.directory / STUDY_LOCK)
        if second is not None:
            os.close(second)
            raise UserError(f"The filesystem of {self.directory} knows no file locks; choose another --output-dir.")

    def folder(self, number: int) -> Path:
        return self.directory / TRIALS / f"{number:04}"

    def trials(self) -> list[Trial]:
        """Return all trials in the order of their numbers."""
        return [_read(file) for file in sorted(self.directory.glob(f"{TRIALS}/*/{TRIAL}"), key=_number)]

    def take(
        self, limit: int | None, suggest: Callable[[SearchSpace, int, Sequence[Trial]], Params]
    ) -> TrialClaim | None:
        """Return a trial to work on: the first that was left, else a new one; None once there are `limit` trials."""
        with self.locked():
            trials = self.trials()
            for trial in trials:
                in_reach = limit is None or trial.number < limit
                if in_reach and trial.state == "running" and not is_running(self.folder(trial.number)):
                    lock = lock_file(self.folder(trial.number) / LOCK)
                    if lock is not None:
                        fresh = Trial(number=trial.number, params=trial.params, is_candidate=trial.is_candidate)
                        self.save(fresh)
                        return TrialClaim(fresh, lock, was_left=True)
            known = {trial.number for trial in trials}
            number = next(number for number in itertools.count() if number not in known)
            if limit is not None and number >= limit:
                return None
            params = suggest(self.space, number, [trial for trial in trials if trial.state != "running"])
            trial = Trial(number=number, params=params, is_candidate=number < len(self.space.candidates))
            lock = lock_file(self.folder(number) / LOCK)
            assert lock is not None, "nobody else makes trials while the study is locked"
            self.save(trial)
            return TrialClaim(trial, lock, was_left=False)

    def save(self, trial: Trial) -> None:
        remove_leftovers(self.folder(trial.number))
        write_atomically(self.folder(trial.number) / TRIAL, (trial.model_dump_json(indent=2) + "\n").encode())


def _as_yaml(space: SearchSpace) -> str:
    data = space.model_dump(mode="json")
    data["space"] = {key: item.model_dump(mode="json", exclude_defaults=True) for key, item in space.space.items()}
    return yaml.safe_dump(data, sort_keys=False)


def _read(file: Path) -> Trial:
    try:
        return Trial.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(f"{file} is damaged ({first_problem(error)}); remove {file.parent} to train it anew.") from None


def _number(file: Path) -> int:
    return int(file.parent.name) if file.parent.name.isdigit() else -1


def _first_difference(saved: SearchSpace, given: SearchSpace) -> str | None:
    """Return which key differs first, and how; None if all are equal."""
    old, new = _flat(saved.model_dump(mode="json")), _flat(given.model_dump(mode="json"))
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            return f"{key} is {_shown(old, key)} there, but {_shown(new, key)} here"
    if list(saved.space) != list(given.space):
        return "the keys under space stand in another order there"
    return None


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {
        key: item
        for inner, content in value.items()
        for key, item in _flat(content, f"{name}.{inner}".lstrip(".")).items()
    }


def _shown(values: dict[str, Any], key: str) -> str:
    return space_files.configs.shown(repr(values[key])) if key in values else "missing"
