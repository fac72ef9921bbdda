"""Reading spaces: every mistake is answered with one sentence that names the key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import Algorithm
from rl_cluster_benchmark.config.traits import is_distributed
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.tools.search.search_space import (
    Game,
    Parameter,
    Params,
    Part,
    Rung,
    Score,
    SearchSpace,
    Steps,
)

AnyPart = TypeVar("AnyPart", bound=Part)
# Keys that a space says in its own words, and where.
ELSEWHERE = {
    "algorithm": "algorithm, at the top of the space",
    "mode": "mode, at the top of the space",
    "env.name": "games",
    "env.seed": "seeds",
    "training.total_timesteps": "total_timesteps, at the top of the space",
    "training.duration_hours": "nothing: trials are compared after equal numbers of steps",
    "output_dir": "--output-dir",
}


class Base(Part):
    """The keys of a space's file that say what all trials share."""

    config: str | None = None
    algorithm: Algorithm | None = None
    mode: Literal["sequential", "parallel"] | None = None
    total_timesteps: Steps
    set: dict[str, Any] = {}


PARTS: dict[str, type[Part]] = {"games": Game, "score": Score, "prune": Rung, "space": Parameter}


def spaces() -> list[str]:
    """Return the names of the spaces that are shipped."""
    return configs.shipped_in(_shipped())


def read_space(path: str, candidates: str | None = None) -> SearchSpace:
    """Read a space from a file, or a shipped one by its name, with the candidates of another file behind its own."""
    file = _find(path)
    source = str(file)
    data = configs.read_yaml(file)
    base = _validated(Base, {key: value for key, value in data.items() if key in Base.model_fields}, source)
    rest = {key: value for key, value in data.items() if key not in Base.model_fields}
    if "base" in rest:
        raise UserError(f"{source}: base is not a known key; {_known(())}")
    games = rest.get("games")
    game = next(iter(games), None) if isinstance(games, dict) else None
    space = _validated(SearchSpace, {**rest, "base": _base_data(base, game, source)}, source)
    try:
        for key in (*base.set, *space.space):
            if (sentence := configs.without_effect(key, space.base.get("algorithm", "ppo"))) is not None:
                raise UserError(sentence)
        _check(space, set(map(configs.home_of, base.set)))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if candidates is not None:
        space.candidates += _read_candidates(candidates)
    for number, candidate in enumerate(space.candidates):
        space.candidates[number] = _candidate(space, candidate, number)
    return space


def load(file: Path) -> SearchSpace:
    """Read the space that a study has written."""
    space = _validated(SearchSpace, configs.read_yaml(file), str(file))
    try:
        _check(space, set())
    except (UserError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is damaged: {error}") from None
    return space


def _shipped() -> Path:
    return configs.preset_dir() / "search"


def _find(path: str) -> Path:
    return configs.find_shipped(path, _shipped(), "config/search", ("Space", "", "Spaces that are shipped"))


def _validated(model: type[AnyPart], data: object, source: str) -> AnyPart:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {_sentence(dict(error.errors()[0]))}") from None


def _sentence(item: dict[str, Any]) -> str:
    key = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"{key} is missing; a space must have it."
    if item["type"] == "extra_forbidden":
        return f"{configs.shown(key)} is not a known key; {_known(item['loc'][:-1])}"
    if item["type"] == "dict_type":
        return f"{key} must be a section with keys, not a single value or a list."
    return configs.explain(item)


def _known(loc: tuple[Any, ...]) -> str:
    part = PARTS.get(loc[0]) if loc else None
    names = (
        part.model_fields
        if part
        else [*Base.model_fields, *(name for name in SearchSpace.model_fields if name != "base")]
    )
    return f"known here: {', '.join(names)}."


def _base_data(base: Base, game: object, source: str) -> dict[str, Any]:
    """Return the settings of all trials: those of the config, or of the preset for `game`, with `set` on top."""
    settings: dict[str, object] = {}
    for key, value in base.set.items():
        try:
            _refuse_elsewhere(key)
            configs.refuse_section(key)
            settings[key] = configs.checked(key, value)
        except UserError as error:
            raise UserError(f"{source}: set: {error}") from None
    top = {name: value for name in ("algorithm", "mode") if (value := getattr(base, name)) is not None}
    path = base.config or configs.preset_of(base.algorithm, base.mode, game)
    data = configs.read_yaml(path) if path is not None else {}
    always = {"training.total_timesteps": base.total_timesteps, "training.duration_hours": None, "output_dir": None}
    merged = configs.merge(data, {**configs.in_place_of_others(settings), **top, **always})
    if is_distributed(merged.get("mode")):
        raise UserError(f"{source}: mode = distributed is not allowed; it must be sequential or parallel.")
    return merged


def _refuse_elsewhere(key: str) -> None:
    if (home := ELSEWHERE.get(configs.home_of(key))) is not None:
        raise UserError(f"{key} is not set here, but by {home}.")


def _check(space: SearchSpace, fixed: set[str]) -> None:
    """Check what only a look at the config and at several keys can tell; values become what the config will hold."""
    games = [configs.checked("env.name", name) for name in space.games]
    if len(set(games)) < len(games):
        raise UserError(f"games has one twice ({', '.join(space.games)}); each must be different.")
    space.games = dict(zip(games, space.games.values(), strict=True))
    for name, game in space.games.items():
        if not game.high > game.low:
            raise UserError(f"games.{name}.high = {game.high:g} must be greater than low = {game.low:g}.")
    space.seeds = [configs.checked("env.seed", seed) for seed in space.seeds]
    if len(set(space.seeds)) < len(space.seeds):
        raise UserError("seeds has one twice; each must be different.")
    total = space.total_timesteps
    if space.score.last_steps > total:
        raise UserError(f"score.last_steps = {space.score.last_steps:,} must be at most total_timesteps = {total:,}.")
    before = 0
    for number, rung in enumerate(space.prune):
        if not before < rung.at < total:
            raise UserError(
                f"prune.{number}.at = {rung.at:,} must be more than {before:,}, less than total_timesteps = {total:,}."
            )
        before = rung.at
    try:
        _check_parameters(space, fixed)
    except UserError as error:
        raise UserError(f"space: {error}") from None


def _check_parameters(space: SearchSpace, fixed: set[str]) -> None:
    fields = {f"{section}.{key}" if section else key: field for section, key, field in configs.fields()}
    above: dict[str, Parameter] = {}
    for given, parameter in space.space.items():
        _refuse_elsewhere(given)
        key = configs.home_of(given)
        if key in fixed:
            raise UserError(f"{given} is under set too; it must be either fixed or searched.")
        configs.refuse_section(given)
        if key not in fields:
            configs.checked(key, None)  # raises, and says which key may be meant
        _check_values(key, parameter, configs.allowed(fields[key]))
        _check_condition(key, parameter, above)
        above[key] = parameter
    space.space = above


def _check_values(key: str, parameter: Parameter, allowed: str) -> None:
    is_range = parameter.low is not None or parameter.high is not None
    if is_range == (parameter.choices is not None):
        raise UserError(f"{key} must have either choices or low and high.")
    if parameter.choices is not None:
        if not parameter.choices or parameter.log or parameter.step is not None:
            raise UserError(f"{key} must have at least one choice, and log and step are for ranges.")
        parameter.choices = [configs.checked(key, value) for value in parameter.choices]
        if any(value in parameter.choices[:number] for number, value in enumerate(parameter.choices)):
            raise UserError(f"{key} has a choice twice; each must be different.")
        return
    if parameter.low is None or parameter.high is None:
        raise UserError(f"{key} must have both low and high.")
    if "number" not in allowed:
        raise UserError(f"{key} has no range; give choices (it takes: {allowed.replace('`', '')}).")
    parameter.low, parameter.high = configs.checked(key, parameter.low), configs.checked(key, parameter.high)
    if not parameter.low < parameter.high:
        raise UserError(f"{key}: high = {parameter.high} must be greater than low = {parameter.low}.")
    if parameter.log and (parameter.low <= 0 or parameter.step is not None):
        raise UserError(f"{key}: a log range must have a low greater than 0 and no step.")
    if parameter.step is not None:
        is_whole = isinstance(parameter.low, int)
        is_number = type(parameter.step) in ((int,) if is_whole else (int, float))
        if not is_number or parameter.step <= 0 or not parameter.holds(parameter.high):
            kind = "whole number" if is_whole else "number"
            raise UserError(
                f"{key}: step = {configs.shown(parameter.step)} must be a {kind} whose multiples lead from low to high."
            )


def _check_condition(key: str, parameter: Parameter, above: dict[str, Parameter]) -> None:
    """Check that a condition names keys above it that have choices, and some of these choices."""
    conditions: dict[str, Any] = {}
    for given, values in parameter.when.items():
        other = configs.home_of(given)
        if other not in above or above[other].choices is None:
            raise UserError(f"{key}: when names {given}, which must be a key with choices above it in the space.")
        conditions[other] = [
            configs.checked(other, value) for value in (values if isinstance(values, list) else [values])
        ]
        for value in conditions[other]:
            if not above[other].holds(value):
                raise UserError(
                    f"{key}: when {given} = {configs.shown(value)} is never so; it must be among "
                    f"{above[other].words()}."
                )
    parameter.when = conditions


def _read_candidates(path: str) -> list[Params]:
    file = Path(path)
    try:
        data = configs.parse_yaml(file.read_bytes()[: configs.MAX_BYTES + 1])
    except OSError as error:
        raise UserError(f"--enqueue {file}: cannot be read ({error.strerror or error}).") from None
    except ValueError as error:
        raise UserError(f"--enqueue {file}: {error}.") from None
    found = [data] if isinstance(data, dict) else data
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise UserError(
            f"--enqueue {file}: must be a list of candidates, each with keys of the space and their values."
        )
    return found


def _candidate(space: SearchSpace, candidate: Params, number: int) -> Params:
    """Return the candidate in the order of the space; the sampler adds what it leaves out."""
    where = f"candidate {number + 1}"
    given = {configs.home_of(str(key)): value for key, value in candidate.items()}
    for key in given:
        if key not in space.space:
            raise UserError(f"{where}: {key} is not in the space; it must be one of {', '.join(space.space)}.")
    params: Params = {}
    for key, parameter in space.space.items():
        if key not in given:
            continue
        try:
            value = configs.checked(key, given[key])
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if not parameter.holds(value):
            raise UserError(
                f"{where}: {key} = {configs.shown(value)} is not in the space; it must be among {parameter.words()}."
            )
        if not parameter.exists(params):
            needed = " and ".join(
                f"{other} = {' or '.join(map(str, values))}" for other, values in parameter.when.items()
            )
            raise UserError(f"{where}: {key} exists only with {needed}, which the candidate must say too.")
        params[key] = value
    return params
