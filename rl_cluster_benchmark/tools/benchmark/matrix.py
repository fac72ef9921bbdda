"""What a benchmark consists of: its cells, each one training run and its evaluation."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import MAX_HOURS, MAX_INT, EnvName
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.core.errors import UserError

FILE = "benchmark.yaml"
LONGEST_NAME = 240  # of a cell, in bytes: file systems allow 255, and its log has a suffix


@dataclass(frozen=True)
class Cell:
    variant: str  # ppo_parallel, or a config file's name
    game: str
    seed: int
    arguments: tuple[str, ...]  # of `rlcb train`, without the output directory

    @property
    def name(self) -> str:
        return f"{self.variant}_{self.game}_seed{self.seed}"


class Matrix(BaseModel):
    """Written to benchmark.yaml; whoever resumes the benchmark reads it there."""

    model_config = ConfigDict(extra="forbid")

    algorithms: list[str] = []
    modes: list[str] = []
    configs: list[str] = []  # instead of algorithms x modes
    games: Annotated[list[EnvName], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(min_length=1)]
    duration_hours: Annotated[float, Field(gt=0, le=MAX_HOURS, allow_inf_nan=False)] | None = None
    total_timesteps: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    episodes: Annotated[int, Field(ge=1, le=10**9)] = 100
    deterministic: bool = False
    settings: list[str] = []  # section.key=value, of every cell

    @model_validator(mode="after")
    def _check_names(self) -> Matrix:
        for name in (cell.name for cell in self.cells()):
            is_odd = not name.isprintable() or "/" in name or name.startswith(".")
            if is_odd or len(os.fsencode(name)) > LONGEST_NAME:
                raise UserError(
                    f"A cell cannot be called {name!a}: names of configs and games become names of directories, "
                    f'without "/", a leading "." and control characters and at most {LONGEST_NAME} bytes long. '
                    "Rename the config file."
                )
        return self

    def cells(self) -> list[Cell]:
        """Return the cells seed by seed, so that after the first round every variant has a result."""
        limits: list[str] = []
        if self.duration_hours is not None:
            limits += ["--duration", str(self.duration_hours)]
        if self.total_timesteps is not None:
            limits += ["--total-timesteps", str(self.total_timesteps)]
        for setting in self.settings:
            limits += ["--set", setting]
        return [
            Cell(name, short_name(game), seed, (*variant, "--env", game, "--seed", str(seed), *limits))
            for seed in self.seeds
            for game in self.games
            for name, variant in self._variants()
        ]

    def _variants(self) -> list[tuple[str, list[str]]]:
        """Return the name of each variant and its arguments."""
        if self.configs:
            return [(Path(file).stem, ["--config", file]) for file in self.configs]
        return [
            (f"{algorithm}_{mode}", ["--algorithm", algorithm, "--mode", mode])
            for algorithm in self.algorithms
            for mode in self.modes
        ]


def short_name(env: str) -> str:
    return env.removeprefix("procgen-").removesuffix("-v0") if env.startswith("procgen-") else env


def build(**values: object) -> Matrix:
    """Return the matrix that a command line asks for; answer every mistake with a sentence."""
    try:
        matrix = Matrix.model_validate(values)
    except ValidationError as error:
        raise UserError(_sentence(error)) from None
    twice = [name for name, count in Counter(cell.name for cell in matrix.cells()).items() if count > 1]
    if twice:
        raise UserError(f"The benchmark would hold {twice[0]} twice; name each game, seed, algorithm and config once.")
    if matrix.duration_hours is None and matrix.total_timesteps is None:
        raise UserError("Say how long each run trains: --duration HOURS, or --total-timesteps N.")
    return matrix


def save(matrix: Matrix, directory: Path) -> None:
    write_atomically(directory / FILE, yaml.safe_dump(matrix.model_dump(mode="json"), sort_keys=False).encode())


def load(directory: Path) -> Matrix:
    try:
        return Matrix.model_validate(configs.read_yaml(directory / FILE))
    except ValidationError as error:
        raise UserError(f"{directory / FILE} is damaged: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    message = str(first.get("ctx", {}).get("error", first["msg"]))
    return f"{key} = {first['input']} {message}." if first["type"] == "value_error" else f"{key}: {message}."
