"""Reading, checking and writing configs: YAML files and command-line overrides, one sentence for every mistake.

Precedence: the defaults < the YAML file < the command line.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import ValidationError

from rl_cluster_benchmark.config.schema import (
    MAY_CHANGE,
    TOY_ENVS,
    Algorithm,
    Config,
    Section,
    TrainingConfig,
    UsedBy,
)
from rl_cluster_benchmark.config.traits import is_distributed
from rl_cluster_benchmark.core.errors import UserError

MAX_BYTES, MAX_DEPTH = 1_000_000, 16  # limits of a YAML file: far more than a config needs
MAX_SHOWN = 120  # characters of a wrong value that an error message repeats

# Keys that older configs keep under `training`, and where they live now.
MOVED_KEYS = {"num_envs": "env", "seed": "env", "device": "hardware", "num_threads": "hardware"}

DEFAULT_STEPS: int = TrainingConfig.model_fields["total_timesteps"].default

# A key -> another one that says the same in other words, and goes before it where both are set.
SAID_OTHERWISE = {"env.num_envs": "parallel.num_envs_per_worker", "parallel.num_workers": "impala.num_actors"}

# Overrides for reading the config.yaml of a run: older ones hold a value that is refused today and never had an effect.
AS_IT_WAS: dict[str, object] = {"env.use_sequential_levels": False}


def load(path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> Config:
    """Read a YAML file (or a preset's name) and lay `{'section.key': value}` overrides on top."""
    data = read_yaml(path) if path is not None else {}
    return build(data, overrides or {}, source=str(path) if path is not None else "default config")


def build(data: Mapping[str, Any], overrides: Mapping[str, object], *, source: str) -> Config:
    """Return the checked config of `data` with command-line overrides on top; errors name `source` as its origin."""
    merged = merge(data, overrides)
    changed = {home_of(dotted) for dotted in overrides}
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        sentences = []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            sentences.append(f"{'command line' if key in changed else source}: {explain(dict(item))}")
        raise UserError("\n".join(sentences)) from None


def with_changes(config: Config, changes: Mapping[str, object], *, source: str) -> Config:
    """Return this config with `{'section.key': value}` changed, checked again; `source` names it in a mistake."""
    return build(to_dict(config), changes, source=source)


def merge(data: Mapping[str, Any], overrides: Mapping[str, object]) -> dict[str, Any]:
    """Return the data of a YAML file with `{'section.key': value}` overrides on top, unchecked."""
    merged = _move_old_keys(data)
    for dotted, value in overrides.items():
        _assign(merged, home_of(dotted), value)
    return merged


def in_place_of_others(overrides: Mapping[str, object]) -> dict[str, object]:
    """Return overrides that count even where a file says the same in other words: that is put aside.

    A preset may have environments for each worker, or a number of actors. Whoever asks for a number of environments or
    of workers means that number, unless both are asked for.
    """
    asked = {home_of(dotted) for dotted in overrides}
    aside = {other: None for key, other in SAID_OTHERWISE.items() if key in asked and other not in asked}
    return {**overrides, **aside}


def refuse_section(key: str) -> None:
    """Raise a UserError if the key is a whole section: setting it would reset the keys that are not mentioned."""
    inside = [name for section, name, _ in fields() if section and section == key]
    if inside:
        raise UserError(f"{key} is a section; name its keys, for example {key}.{inside[0]}.")


def home_of(dotted: str) -> str:
    """Return where a key lives today, for older configs that keep it under `training`; other keys stay as they are."""
    section, _, key = dotted.rpartition(".")
    return f"{MOVED_KEYS[key]}.{key}" if section == "training" and key in MOVED_KEYS else dotted


def checked(dotted: str, value: object) -> Any:
    """Return a key's value as the config will hold it; raise a UserError for an unknown key or a value it cannot have.

    Rules that concern several keys together are not checked.
    """
    path = tuple(home_of(dotted).split("."))
    try:
        found: Any = Config.model_validate(merge({}, {dotted: value}))
    except ValidationError as error:
        for item in error.errors():
            if item["loc"][: len(path)] == path or item["type"] in ("extra_forbidden", "model_type"):
                raise UserError(explain(dict(item))) from None
        return value
    for name in path:
        found = getattr(found, name)
    return found


def with_workers(config: Config, num_workers: int) -> Config:
    """Return the config with the number of workers set, and of environments if num_envs_per_worker is set."""
    changes: dict[str, object] = {"parallel.num_workers": num_workers}
    if config.parallel.num_envs_per_worker is not None:
        changes["env.num_envs"] = num_workers * config.parallel.num_envs_per_worker
    return with_changes(config, changes, source=f"{num_workers} workers")


class PlainLoader(yaml.SafeLoader):
    """A YAML loader for plain values of limited depth; it refuses aliases, a few lines of which can mean gigabytes."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def parse_yaml(content: bytes | str) -> Any:
    """Return the content of a YAML text; raise a ValueError whose message completes the sentence "FILE: ..."."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES:,} bytes: no config is")
    try:
        return yaml.load(content, Loader=PlainLoader)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        ArithmeticError,
        AttributeError,
        TypeError,
        LookupError,
    ) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        message = getattr(error, "problem", None) or str(error) or type(error).__name__
        raise ValueError(f"is not valid YAML{where} ({' '.join(str(message).split())[:MAX_SHOWN]})") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    file = find_config(path)
    try:
        with open(file, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}).") from None
    try:
        data = parse_yaml(content)
    except ValueError as error:
        raise UserError(f"{file}: {error}.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{file}: must hold sections such as 'training:', but holds a {type(data).__name__}.")
    return data


def preset_dir() -> Path:
    """Return the folder of the presets: `config/` of a checkout, or the copy inside an installed package."""
    package = Path(__file__).parent.parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "config"


def presets() -> list[str]:
    return shipped_in(preset_dir())


def preset_of(algorithm: object, mode: object, env: object) -> str | None:
    """Return the name of the preset that a command line without --config starts from; None if there is none."""
    task = "cpu_cluster" if is_distributed(mode) else "toy" if env in TOY_ENVS else "procgen"
    preset = f"{algorithm or 'ppo'}_{task}"
    return preset if preset in presets() else None


def find_config(path: str | Path) -> Path:
    """Return the file that a path or the name of a preset (`ppo_sequential`) stands for."""
    return find_shipped(path, preset_dir(), "config", ("Config file", "the preset ", "Presets"))


def find_shipped(path: str | Path, folder: Path, its_name: str, words: tuple[str, str, str]) -> Path:
    """Return the file that a path stands for, or the name of a YAML file in this folder, which `its_name` names, too.

    `words` are what it is, what may be meant, and what there is, for the error.
    """
    file = Path(path)
    if file.is_file():
        return file
    shipped = folder / f"{file.stem}.yaml"
    if shipped.is_file() and str(file.parent) in (".", its_name) and file.suffix in ("", ".yaml"):
        return shipped
    names = shipped_in(folder)
    near = difflib.get_close_matches(file.stem, names, n=1)
    hint = f"Did you mean {words[1]}{near[0]}?" if near else f"{words[2]}: {', '.join(names)}."
    raise UserError(f"{words[0]} {file} does not exist. {hint}")


def shipped_in(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def parse_assignment(text: str) -> tuple[str, object]:
    """Return key and value of a `section.key=value` argument, the value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: write it as section.key=value, for example --set training.gamma=0.99.")
    refuse_section(key.strip())
    try:
        return key.strip(), parse_yaml(value)
    except ValueError:
        raise UserError(f"--set {shown(text)}: the value is not valid YAML; put it in quotes.") from None


def shown(value: object) -> str:
    """Return a wrong value as a text that is short enough for an error message."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes no numbers of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def to_dict(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def recorded(config: Config) -> dict[str, Any]:
    """Return the keys that the config's algorithm uses: what config.yaml holds."""
    data = to_dict(config)
    for section, key, field in fields():
        if section and config.algorithm not in users(section, field):
            del data[section][key]
    return {name: content for name, content in data.items() if content != {}}


def users(section: str, field: Any) -> tuple[str, ...]:
    """Return the algorithms that use a key."""
    if section == "impala":
        return ("impala",)
    return next((mark.algorithms for mark in field.metadata if isinstance(mark, UsedBy)), get_args(Algorithm))


def users_of(dotted: str) -> tuple[str, ...]:
    """Return the algorithms that use `section.key`."""
    found = (users(section, field) for section, key, field in fields() if f"{section}.{key}" == dotted and section)
    return next(found, get_args(Algorithm))


def without_effect(key: str, algorithm: str) -> str | None:
    """Return the sentence for a key that the algorithm does not use; None if it does."""
    using = users_of(home_of(key))
    if algorithm in using:
        return None
    return (
        f"{key} has no effect: {algorithm} does not use it ({', '.join(using)} {'does' if len(using) == 1 else 'do'})."
    )


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(recorded(config), sort_keys=False)


def _assign(data: dict[str, Any], dotted: str, value: object) -> None:
    *sections, key = dotted.split(".")
    for name in sections:
        section = data.setdefault(name, {})
        if section is None:
            section = data[name] = {}
        if not isinstance(section, dict):
            raise UserError(f"{dotted}: {name} is a value, not a section.")
        data = section
    data[key] = value


def _move_old_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    moved = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items() if value is not None}
    training = moved.get("training")
    if isinstance(training, dict):
        for key, section in MOVED_KEYS.items():
            if key in training:
                home = moved.setdefault(section, {})
                if isinstance(home, dict):
                    home.setdefault(key, training[key])
                    del training[key]
    return moved


def fields() -> Iterator[tuple[str, str, Any]]:
    """Yield every setting as (section or '', key, pydantic field), in the order of the schema."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key, inner in field.annotation.model_fields.items():
                yield name, key, inner
        else:
            yield "", name, field


def explain(item: dict[str, Any]) -> str:
    """Return the sentence that answers one of pydantic's errors: which key, which value, what is allowed."""
    key, kind, value = shown(".".join(str(part) for part in item["loc"])), item["type"], item["input"]
    if kind == "extra_forbidden":
        return _unknown_key(item["loc"])
    if kind == "value_error":
        message = str(item["ctx"]["error"])
        return f"{key} = {shown(value)} {message}." if key and not isinstance(value, dict | Section) else f"{message}."
    allowed = {
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be {expected}",
        "int_type": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "bool_parsing": "must be true or false",
        "bool_type": "must be true or false",
        "string_type": "must be a text",
        "string_too_short": "must not be empty",
        "string_pattern_mismatch": "must be cpu, cuda or cuda:N",
        "list_type": "must be a list",
        "too_short": "must not be empty",
        "model_type": "must be a section with keys, not a single value",
    }.get(kind)
    text = allowed.format(**item.get("ctx", {})) if allowed else item["msg"]
    return f"{key} = {shown(repr(value) if isinstance(value, str) else value)} is not allowed; it {text}."


def _unknown_key(loc: tuple[Any, ...]) -> str:
    key = ".".join(map(str, loc))
    known = [f"{section}.{name}" if section else name for section, name, _ in fields()]
    if len(loc) == 1:
        known += list(Config.model_fields)
    inside = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    # The same key in another section is a likelier slip than a similar one in this section.
    elsewhere = [name for name in known if name.rpartition(".")[2] == str(loc[-1])]
    near = elsewhere or difflib.get_close_matches(key, inside, n=1, cutoff=0.5) or inside
    hint = (
        f"did you mean {near[0]}?"
        if len(near) == 1
        else f"known here: {', '.join(n.rpartition('.')[2] for n in near)}."
    )
    return f"{shown(key)} is not a known key; {hint}"


def reference_markdown() -> str:
    """Return the text of docs/configuration.md, generated so that it cannot differ from the code."""
    lines = ["# Configuration reference", "", "<!-- generated by `rlcb config --markdown`; do not edit -->", ""]
    lines += [
        "Defaults < YAML file (`--config`) < command line. Any key can be set with `--set section.key=value`.",
        "`num_envs`, `seed`, `device` and `num_threads` are also accepted under `training`.",
        "`rlcb config` prints the complete config that a command line would run with.",
        "",
        "A run that is resumed goes on with the same task: a key that `stays` must not differ from the run's own.",
        "`auto` is no other value than what it stands for.",
    ]
    section = None
    for name, key, field in fields():
        if name != section:
            doc = getattr(Config.model_fields[name].annotation, "__doc__", "") if name else "At the top of the file."
            lines += ["", f"## `{name}`" if name else "## Top level", "", doc or "", ""]
            lines += ["| key | default | allowed | used by | on `--resume` | meaning |", "|-|-|-|-|-|-|"]
            section = name
        default = yaml.safe_dump(field.get_default(), default_flow_style=True).strip().removesuffix("...").strip()
        resumed = "may change" if MAY_CHANGE in field.metadata else "stays"
        used_by = users(name, field)
        whom = "all" if used_by == get_args(Algorithm) else ", ".join(used_by)
        lines.append(f"| `{key}` | `{default}` | {allowed(field)} | {whom} | {resumed} | {field.description} |")
    return "\n".join(lines) + "\n"


def allowed(field: Any) -> str:
    """Return in a few words which values a setting may have."""
    bounds = {"Ge": "≥ {ge}", "Gt": "> {gt}", "Le": "≤ {le}"}
    limits = [
        bounds[type(meta).__name__].format(**{type(meta).__name__.lower(): getattr(meta, type(meta).__name__.lower())})
        for meta in field.metadata
        if type(meta).__name__ in bounds
    ]
    return " ".join([_type_name(field.annotation), *limits])


def _type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is list:
        return f"list of {_type_name(args[0])}s"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args)
    return {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}[annotation]
