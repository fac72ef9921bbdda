"""The space of a search: what is tried, on which games, how a trial is scored, and when it is stopped early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import MAX_INT, Config, Float, Int
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.benchmark.matrix import short_name

Steps = Annotated[Int, Field(ge=1, le=MAX_INT)]
Params = dict[str, Any]
"""Config key -> value, in the order of the space; a dependent key that does not exist in a trial is missing."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Parameter(Part):
    """The values that a key may have: some choices, or a range."""

    choices: list[Any] | None = None
    low: Any = None
    high: Any = None
    log: bool = False
    step: Any = None
    when: dict[str, Any] = {}  # the key exists only if each of these keys has one of these values

    def exists(self, params: Params) -> bool:
        return all(key in params and params[key] in values for key, values in self.when.items())

    def holds(self, value: object) -> bool:
        """Return whether the value is one of the choices, or in the range."""
        if self.choices is not None:
            return value in self.choices
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return self.step is None or abs(round((value - self.low) / self.step) * self.step + self.low - value) < 1e-9

    def words(self) -> str:
        """Return what is allowed, for a sentence."""
        if self.choices is not None:
            return ", ".join(map(configs.shown, self.choices))
        return f"{self.low} to {self.high}" + (f" in steps of {self.step}" if self.step is not None else "")


class Game(Part):
    """The returns that count as 0 and as 1."""

    low: Float
    high: Float

    def normalised(self, mean_return: float) -> float:
        return (mean_return - self.low) / (self.high - self.low)


class Score(Part):
    last_steps: Steps  # the score is the mean return of the episodes that end in the last steps of a run


class Rung(Part):
    """After so many steps of each run, a trial goes on only if it is among the better ones."""

    at: Steps
    stop: Annotated[Float, Field(gt=0, lt=1)] = 0.5  # the share of the trials that is stopped
    after: Annotated[Int, Field(ge=1)] = 4  # trials that reach the rung before any is stopped


class SearchSpace(Part):
    """What a study is about; search.yaml in its directory holds it."""

    base: dict[str, Any]  # the settings that all trials share, as a config file has them
    games: Annotated[dict[str, Game], Field(min_length=1)]
    seeds: Annotated[list[Any], Field(min_length=1)] = [1]
    score: Score
    prune: list[Rung] = []
    space: Annotated[dict[str, Parameter], Field(min_length=1)]
    candidates: list[Params] = []  # the first trials
    startup_trials: Annotated[Int, Field(ge=1)] = 10  # drawn at random before the sampler looks at results
    seed: Annotated[Int, Field(ge=0, le=2**32 - 1)] = 0  # of the search; the runs have `seeds`

    @field_validator("space", mode="before")
    @classmethod
    def _lists_are_choices(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {key: {"choices": item} if isinstance(item, list) else item for key, item in value.items()}

    @property
    def total_timesteps(self) -> int:
        return int(self.base["training"]["total_timesteps"])

    def runs(self) -> dict[str, tuple[str, int]]:
        """Return the runs of a trial: name -> (game, seed)."""
        return {f"{short_name(game)}_seed{seed}": (game, seed) for seed in self.seeds for game in self.games}

    def config_of(self, params: Params) -> Config:
        """Return the config of a trial, with its first game and seed; raise a UserError if there is none."""
        chosen = configs.in_place_of_others(params)
        first = {"env.name": next(iter(self.games)), "env.seed": self.seeds[0]}
        try:
            return configs.build(self.base, {**chosen, **first}, source="config")
        except UserError as error:
            sentence = str(error).splitlines()[0]
            raise UserError(sentence.removeprefix("config: ").removeprefix("command line: ")) from None

    def score_of(self, returns: Mapping[str, float]) -> float:
        """Return the mean over games and seeds of the normalised returns; `returns` has one for each run."""
        runs = self.runs()
        return sum(self.games[runs[name][0]].normalised(value) for name, value in returns.items()) / len(runs)
