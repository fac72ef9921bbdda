"""The format of a checkpoint, checked because a checksum proves that a file is whole, but not who wrote it.

Before torch reads a file, its archive is checked: no entry may be compressed (a few bytes could expand to gigabytes),
and only tensors and plain containers may be named. What was read is then validated value by value.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

FORMAT_VERSION = 2
MAX_BYTES = 4 << 30
MAX_DESCRIPTION = 16 << 20  # bytes of the pickle in it, which describes the content without the tensors' numbers
MAX_NAMES = 10_000
PROTOCOL = 2  # the pickle protocol that torch.save uses
NAMING = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")  # pickle's other ways to name

ALLOWED = frozenset(
    {"torch._utils _rebuild_tensor_v2", "collections OrderedDict"}
    | {f"torch {kind}Storage" for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Bool", "Byte")}
)


class FormatError(ValueError):
    """A checkpoint that is refused; the message completes the sentence `Checkpoint P ...`."""


class NewerFormatError(FormatError):
    """A checkpoint of a newer format, which this version of the program does not know."""


def check_archive(content: bytes) -> None:
    """Raise FormatError unless torch can read the archive safely, in about as much memory as the file is long."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise FormatError("was refused: parts of it are packed, which this program never does")
            if sum(entry.file_size for entry in entries) > len(content):
                raise FormatError("was refused: it claims to hold more than the file is long")
            names = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(names) != 1 or names[0].file_size > MAX_DESCRIPTION:
                raise FormatError("is not a checkpoint of this program")
            description = archive.read(names[0])
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise error if isinstance(error, FormatError) else FormatError("is not a checkpoint of this program") from None
    _check_names(description)


def _check_names(description: bytes) -> None:
    named = set()
    try:
        for operation, argument, _ in pickletools.genops(description):
            if operation.name == "GLOBAL":
                named.add(argument)
            elif operation.name in NAMING or (operation.name == "PROTO" and argument != PROTOCOL):
                named.add(operation.name)
    except Exception:  # a hostile file may make the parser raise anything
        raise FormatError("is not a checkpoint of this program") from None
    if named - ALLOWED:
        raise FormatError("was refused: it holds more than tensors and plain values; loading it could run code")


# What a run writes

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Annotated[list[Number], Field(max_length=MAX_NAMES)]


def _as_large_as_it_claims(tensor: torch.Tensor) -> torch.Tensor:
    """Refuse a tensor that is larger than its storage: strides of zero can make it any size from one number."""
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ValueError("claims more numbers than it has")
    return tensor


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Refuse a config with other values than plain ones, or with very many."""
    found: list[Any] = [config]
    for value in found:  # the list grows within the loop
        if len(found) > MAX_NAMES or not isinstance(value, dict | list | str | int | float | None):
            raise ValueError("is no config")
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return config


Tensor = Annotated[torch.Tensor, AfterValidator(_as_large_as_it_claims)]
Names = Annotated[dict[str, Tensor], Field(max_length=MAX_NAMES)]


class _Part(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, strict=True)  # without strict, a tensor passes as a list


class _Episodes(_Part):
    count: Count
    total: Number = 0.0
    first: Numbers
    last: Numbers
    last_lengths: Numbers
    best: Number | None


class _Means(_Part):
    sums: dict[str, Number]
    counts: dict[str, Count]


MAX_PARTS = 1000  # that differ, of a run that was resumed


class _Progress(_Part):
    steps: Count
    updates: Count
    elapsed: Annotated[Number, Field(ge=0)]
    cpu_seconds: Number
    phase_seconds: dict[str, Number]
    peak_memory: Number
    episodes: _Episodes
    asynchrony: _Means
    bad_numbers: dict[str, Number]
    run_id: Annotated[str, Field(max_length=64)] | None = None  # missing in older checkpoints
    parts: Annotated[list[dict[str, str | int | None]], Field(max_length=MAX_PARTS)] = []  # missing in older ones, too


class _Optimizer(_Part):
    steps: Annotated[Number, Field(ge=0)]
    moments: Annotated[dict[str, Names], Field(max_length=8)]


class _Scale(_Part):
    mean: Number
    variance: Annotated[Number, Field(ge=0)]
    count: Annotated[Number, Field(gt=0)]


class _Moments(_Part):
    sums: Annotated[Numbers, Field(min_length=3, max_length=3)]


class _Algorithm(_Part):
    optimizer: _Optimizer
    reward_normalizer: _Scale
    advantages: _Moments | None = None  # IMPALA's; missing in older checkpoints


class _Checkpoint(_Part):
    config: Annotated[dict[str, Any], Field(max_length=100), AfterValidator(_plain)]
    model: Names
    algorithm: _Algorithm
    progress: _Progress
    observation_shape: Annotated[list[Count], Field(min_length=1, max_length=8)]
    num_actions: Annotated[int, Field(ge=1)]


def upgraded(state: Any) -> dict[str, Any]:
    """Return the content in the current format, whichever version wrote it; raise FormatError if it is not valid."""
    version = state.get("format_version") if isinstance(state, dict) else None
    if type(version) is not int or version < 1:
        raise FormatError("is not a checkpoint of this program")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"has format {version}, this version reads 1 to {FORMAT_VERSION}; use the version of the program that "
            "wrote it, or a newer one"
        )
    for older in range(version, FORMAT_VERSION):
        UPGRADES[older](state)
    try:
        _Checkpoint.model_validate(state)
    except (ValidationError, RecursionError) as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else "it"
        raise FormatError(f"is not a checkpoint of this program ({where[:80]!r} is not as it should be)") from None
    env = state["config"].get("env")
    if isinstance(env, dict) and env.get("use_sequential_levels") is True:
        env["use_sequential_levels"] = False  # older runs may say true, which had no effect and is refused today
    return state


def _from_1(state: dict[str, Any]) -> None:
    """Add what format 1 lacks: counts of bad numbers and, in its oldest files, metrics of asynchrony."""
    if isinstance(state.get("progress"), dict):
        state["progress"].setdefault("asynchrony", {"sums": {}, "counts": {}})
        state["progress"].setdefault("bad_numbers", {})


UPGRADES: dict[int, Callable[[dict[str, Any]], None]] = {1: _from_1}
