"""The one typed config of everything a run needs: YAML in, YAML out, every mistake answered with one sentence.

Precedence: the defaults below < the YAML file < the command line. This module imports neither numpy nor torch, so
that thread counts can be set from the config before those libraries start.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rl_cluster_benchmark.errors import UserError

Algorithm = Literal["ppo", "a2c", "a3c", "impala"]
Mode = Literal["sequential", "parallel", "distributed"]
DistributionMode = Literal["easy", "hard", "extreme", "memory", "exploration"]

PROCGEN_GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
TOY_ENVS = ("CartPole-v1", "Catch-v0")
# Games that know a distribution mode besides easy and hard, which all of them know.
EXTRA_DISTRIBUTION_MODES: dict[str, frozenset[str]] = {
    "extreme": frozenset({"chaser", "dodgeball", "leaper", "starpilot"}),
    "memory": frozenset({"caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"}),
    "exploration": frozenset({"caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"}),
}
MAX_LEVEL = 2**31 - 1


def canonical_env_name(name: object) -> object:
    """`coinrun`, `procgen-coinrun-v0` and `procgen:procgen-coinrun-v0` are one game."""
    if not isinstance(name, str):
        return name
    game = name.removeprefix("procgen:").removeprefix("procgen-").removesuffix("-v0").lower()
    if game in PROCGEN_GAMES:
        return f"procgen-{game}-v0"
    if name in TOY_ENVS:
        return name
    known = [*PROCGEN_GAMES, *TOY_ENVS]
    near = difflib.get_close_matches(game, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"is not a known environment; {hint}Known: {', '.join(known)}")


EnvName = Annotated[str, BeforeValidator(canonical_env_name)]


def _number(value: object) -> object:
    """YAML 1.1 reads `3e-4` as a string; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value.replace("_", ""))
        except ValueError:
            return value
    return value


def _whole(value: object) -> object:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Int = Annotated[int, BeforeValidator(_whole), Field(strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class EnvConfig(Section):
    """Which game, which levels, how many copies."""

    name: EnvName = Field(
        "procgen-coinrun-v0",
        description="A Procgen game (`coinrun`, `procgen-coinrun-v0` and `procgen:procgen-coinrun-v0` are the same), "
        "or `CartPole-v1` or `Catch-v0` for quick checks.",
    )
    num_envs: Int = Field(32, ge=1, description="Environments stepped together in sequential mode.")
    seed: Int = Field(42, ge=0, le=2**32 - 1, description="The run's seed; every env, worker and shuffle derives its own.")
    distribution_mode: DistributionMode = Field("easy", description="Procgen's difficulty. All games know easy and hard.")
    num_levels: Int = Field(
        200, ge=0, le=MAX_LEVEL, description="Size of the training set of levels; 0 is all levels, so none stays unseen."
    )
    start_level: Int = Field(0, ge=0, le=MAX_LEVEL, description="First level of the training set.")
    use_sequential_levels: bool = Field(False, description="Procgen: go on to the next level instead of ending.")
    center_agent: bool = Field(True, description="Procgen: centre the view on the agent.")
    use_backgrounds: bool = Field(True, description="Procgen: draw backgrounds; false is plain black.")
    use_monochrome_assets: bool = Field(False, description="Procgen: draw plain rectangles instead of sprites.")
    restrict_themes: bool = Field(False, description="Procgen: use a single theme where a game has several.")
    use_generated_assets: bool = Field(False, description="Procgen: use generated instead of drawn assets.")
    paint_vel_info: bool = Field(False, description="Procgen: paint the agent's velocity into the corner.")
    max_episode_steps: Int | None = Field(
        None, ge=1, description="Steps after which an episode is truncated; null is the game's own limit (mostly 1000)."
    )

    @property
    def game(self) -> str | None:
        """The bare Procgen game, or None for a toy environment."""
        return self.name.removeprefix("procgen-").removesuffix("-v0") if self.name.startswith("procgen-") else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        games = EXTRA_DISTRIBUTION_MODES.get(self.distribution_mode)
        if games is not None and self.game is not None and self.game not in games:
            raise ValueError(
                f"distribution_mode {self.distribution_mode} does not exist for {self.game}; "
                f"games that have it: {', '.join(sorted(games))}"
            )
        if self.start_level + self.num_levels > MAX_LEVEL:
            raise ValueError(f"start_level + num_levels must not exceed {MAX_LEVEL}")
        return self


class ModelConfig(Section):
    """The network that maps observations to action logits and a value."""

    architecture: Literal["auto", "impala", "nature", "mlp"] = Field(
        "auto", description="auto takes impala (the IMPALA-CNN) for images and mlp for vectors; nature is the DQN CNN."
    )
    channels: list[Int] = Field(
        [16, 32, 32], min_length=1, description="Channels of the IMPALA-CNN's stages; each stage halves the image."
    )
    hidden_size: Int = Field(256, ge=1, description="Width of the layer before the heads (IMPALA-CNN and Nature-CNN).")
    mlp_sizes: list[Int] = Field([64, 64], min_length=1, description="Hidden layers of the MLP.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(size < 1 for size in [*self.channels, *self.mlp_sizes]):
            raise ValueError("channels and mlp_sizes must be at least 1 each")
        return self


class TrainingConfig(Section):
    """The learning problem: how much experience, how it is used, when it ends."""

    total_timesteps: Int = Field(25_000_000, ge=1, description="Stop after this many environment steps.")
    duration_hours: Float | None = Field(None, gt=0, description="Stop after this many hours, if that comes first.")
    n_steps: Int = Field(128, ge=1, description="Steps each environment takes between two updates.")
    batch_size: Int = Field(
        1024, ge=1, description="Samples in a minibatch. It must divide num_envs x n_steps; if larger, one minibatch."
    )
    n_epochs: Int = Field(4, ge=1, description="Passes over the experience in each update.")
    learning_rate: Float = Field(3e-4, gt=0, description="Step size of the optimiser.")
    anneal_lr: bool = Field(False, description="Let the learning rate fall linearly to zero over the run.")
    gamma: Float = Field(0.999, ge=0, le=1, description="Discount factor.")
    gae_lambda: Float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    clip_range: Float = Field(0.2, gt=0, description="PPO: the ratio is clipped to 1 +- this.")
    clip_value_loss: bool = Field(True, description="PPO: clip the change of the value by clip_range too.")
    ent_coef: Float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    vf_coef: Float = Field(0.5, ge=0, description="Weight of the value loss.")
    max_grad_norm: Float = Field(0.5, gt=0, description="Gradients are scaled down to this norm.")
    target_kl: Float | None = Field(
        None, gt=0, description="PPO: end an update early once the approximate KL exceeds this; null never does."
    )
    normalize_advantage: bool = Field(True, description="Normalise advantages over each (global) minibatch.")
    normalize_reward: bool = Field(
        True, description="Divide training rewards by the running std of the discounted return; logs stay raw."
    )
    adam_eps: Float = Field(1e-5, gt=0, description="Epsilon of Adam.")
    log_interval: Int = Field(1, ge=1, description="Updates between two lines of metrics.")
    save_interval: Int = Field(100, ge=1, description="Updates between two checkpoints (see also checkpoint_minutes).")


class ImpalaConfig(Section):
    """Used by IMPALA only."""

    vtrace_clip_rho_threshold: Float = Field(1.0, gt=0, description="Clip of the importance weights in the V-trace target.")
    vtrace_clip_pg_rho_threshold: Float = Field(1.0, gt=0, description="Clip of the weights in the policy gradient.")
    entropy_coef: Float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    value_coef: Float = Field(0.5, ge=0, description="Weight of the value loss.")
    max_grad_norm: Float = Field(40.0, gt=0, description="Gradients are scaled down to this norm.")


class ParallelConfig(Section):
    """Parallel mode: worker processes on one machine (for IMPALA, its actors)."""

    num_workers: Int | None = Field(None, ge=1, description="Worker processes; null is one per physical core.")
    num_envs_per_worker: Int = Field(8, ge=1, description="Environments of each worker.")


class ClusterConfig(Section):
    """Distributed mode: several machines."""

    num_workers: Int = Field(1, ge=1, description="Machines that take part, the head included.")
    distributed_backend: Literal["gloo"] = Field("gloo", description="torch.distributed backend; gloo is the one for CPUs.")
    master_addr: str = Field("localhost", min_length=1, description="Address of the head machine.")
    master_port: Int = Field(29500, ge=1, le=65535, description="A free port on the head machine.")


class HardwareConfig(Section):
    """How this machine is used. Nothing here changes what is learned, but for rounding."""

    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, or cuda (sequential mode) where torch has it."
    )
    num_threads: Int | None = Field(
        None, ge=1, description="Threads of torch, OpenMP, BLAS and the environments; null is one per physical core."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto is bfloat16 where the CPU multiplies it fast (AMX, or AVX512-BF16 measured faster)."
    )
    memory_format: Literal["channels_last", "contiguous"] = Field(
        "channels_last", description="Layout of images and convolutions; contiguous is kept for comparison."
    )
    micro_batch: Int | None = Field(
        None, ge=1, description="Samples per backward pass, gradients added up to the minibatch; null fits the cache."
    )


class LoggingConfig(Section):
    """Where a run writes without `--output-dir`, and how often it saves."""

    checkpoint_dir: str | None = Field(None, min_length=1, description="null is `./checkpoints/<algorithm>_<mode>`.")
    log_dir: str = Field("./logs", min_length=1, description="Logs go to `<log_dir>/<ALGORITHM>_<Mode>/`.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    keep_checkpoints: Int = Field(3, ge=1, description="Step checkpoints to keep; the final one always stays.")
    checkpoint_minutes: Float = Field(5.0, gt=0, description="Save at least this often, whatever save_interval says.")


class Config(Section):
    """Everything about a run. `config.yaml` in its directory holds all of it, defaults filled in."""

    algorithm: Algorithm = Field("ppo", description="What learns: ppo, a2c, a3c or impala.")
    mode: Mode = Field("sequential", description="sequential: one process; parallel: all cores; distributed: machines.")
    output_dir: str | None = Field(
        None, min_length=1, description="Directory of the run; null uses logging.log_dir and logging.checkpoint_dir."
    )
    env: EnvConfig = Field(default_factory=EnvConfig, description="")
    model: ModelConfig = Field(default_factory=ModelConfig, description="")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="")
    impala: ImpalaConfig = Field(default_factory=ImpalaConfig, description="")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="")
    hardware: HardwareConfig = Field(default_factory=HardwareConfig, description="")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="")

    @property
    def rollout_size(self) -> int:
        return self.env.num_envs * self.training.n_steps

    @property
    def batch_size(self) -> int:
        """The minibatch in use: a batch_size larger than the rollout is the whole rollout."""
        return min(self.training.batch_size, self.rollout_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.algorithm == "ppo" and self.mode == "sequential" and self.rollout_size % self.batch_size:
            raise ValueError(
                f"training.batch_size = {self.training.batch_size} does not divide the rollout of "
                f"{self.env.num_envs} envs x {self.training.n_steps} steps = {self.rollout_size}; "
                f"sizes near it that do: {', '.join(map(str, _near_divisors(self.rollout_size, self.batch_size)))}"
            )
        if self.hardware.device != "cpu" and self.mode != "sequential":
            raise ValueError(f"hardware.device = {self.hardware.device} works in sequential mode only")
        return self


def _near_divisors(total: int, size: int) -> list[int]:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return sorted(sorted(divisors, key=lambda d: abs(d - size))[:4])


# Keys that older configs keep under `training`, and where they live now.
MOVED_KEYS = {"num_envs": "env", "seed": "env", "device": "hardware", "num_threads": "hardware"}


def load(path: str | Path | None = None, overrides: Mapping[str, object] | None = None) -> Config:
    """Read a YAML file (or a preset's name) and lay `{'section.key': value}` overrides on top."""
    data = read_yaml(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        _assign(data, dotted, value)
    return validate(data, source=str(path) if path is not None else "command line")


def validate(data: Mapping[str, Any], *, source: str) -> Config:
    try:
        return Config.model_validate(_move_old_keys(data))
    except ValidationError as error:
        raise UserError(_sentence(error, source)) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    file = find_config(path)
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{file}: is not valid YAML{where} ({getattr(error, 'problem', None) or error}).") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{file}: must hold sections such as 'training:', but holds a {type(data).__name__}.")
    return data


def preset_dir() -> Path:
    """`config/` of a checkout, or the copy inside an installed package."""
    installed = Path(__file__).parent / "presets"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "config"


def presets() -> list[str]:
    return sorted(file.stem for file in preset_dir().glob("*.yaml"))


def find_config(path: str | Path) -> Path:
    """A path to a file, or the name of a preset (`ppo_sequential`)."""
    file = Path(path)
    if file.is_file():
        return file
    preset = preset_dir() / f"{file.stem}.yaml"
    if preset.is_file() and file.parent.name in ("", "config"):
        return preset
    near = difflib.get_close_matches(file.stem, presets(), n=1)
    hint = f" Did you mean the preset {near[0]}?" if near else f" Presets: {', '.join(presets())}."
    raise UserError(f"Config file {file} does not exist.{hint}")


def parse_assignment(text: str) -> tuple[str, object]:
    """`section.key=value`, the value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {text}: write it as section.key=value, for example --set training.gamma=0.99.")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: the value is not valid YAML; put it in quotes.") from None


def to_dict(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


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
    """Every setting as (section or '', key, pydantic field), in the order of the file."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for key, inner in field.annotation.model_fields.items():
                yield name, key, inner
        else:
            yield "", name, field


def _sentence(error: ValidationError, source: str) -> str:
    return "\n".join(f"{source}: {_explain(dict(item))}" for item in error.errors())


def _explain(item: dict[str, Any]) -> str:
    key, kind, value = ".".join(str(part) for part in item["loc"]), item["type"], item["input"]
    if kind == "extra_forbidden":
        return _unknown_key(item["loc"])
    if kind == "value_error":
        message = str(item["ctx"]["error"])
        return f"{key} = {value} {message}." if key and not isinstance(value, dict | Section) else f"{message}."
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
    return f"{key} = {value!r} is not allowed; it {text}."


def _unknown_key(loc: tuple[Any, ...]) -> str:
    key = ".".join(map(str, loc))
    known = [f"{section}.{name}" if section else name for section, name, _ in fields()]
    if len(loc) == 1:
        known += [name for name in Config.model_fields]
    inside = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    # The same key in another section is a likelier slip than a similar one in this section.
    elsewhere = [name for name in known if name.rpartition(".")[2] == str(loc[-1])]
    near = elsewhere or difflib.get_close_matches(key, inside, n=1, cutoff=0.5) or inside
    hint = f"did you mean {near[0]}?" if len(near) == 1 else f"known here: {', '.join(n.rpartition('.')[2] for n in near)}."
    return f"{key} is not a known key; {hint}"


def reference_markdown() -> str:
    """The configuration reference, generated so that it cannot differ from the code."""
    lines = ["# Configuration reference", "", "<!-- generated by `rlcb config --markdown`; do not edit -->", ""]
    lines += [
        "Defaults < YAML file (`--config`) < command line. Any key can be set with `--set section.key=value`.",
        "`num_envs`, `seed`, `device` and `num_threads` are also accepted under `training`.",
        "`rlcb config` prints the complete config that a command line would run with.",
    ]
    section = None
    for name, key, field in fields():
        if name != section:
            doc = getattr(Config.model_fields[name].annotation, "__doc__", "") if name else "At the top of the file."
            lines += ["", f"## `{name}`" if name else "## Top level", "", doc or "", ""]
            lines += ["| key | default | allowed | meaning |", "|-|-|-|-|"]
            section = name
        default = yaml.safe_dump(field.get_default(), default_flow_style=True).strip().removesuffix("...").strip()
        lines.append(f"| `{key}` | `{default}` | {_allowed(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def _allowed(field: Any) -> str:
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
