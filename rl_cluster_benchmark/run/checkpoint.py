"""Checkpoints: tensors and plain values only, written whole or not at all, read without running any code in them.

A file is what torch.save writes, then a mark, then the SHA-256 of what stands before it. checkpoint_format.py says what
may be in it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark import config_files as configs
from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.checkpoint_format import (
    FORMAT_VERSION,
    MAX_BYTES,
    FormatError,
    NewerFormatError,
    check_archive,
    upgraded,
)
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.files import write_atomically

MARK = b"RLCB-SHA256:"  # behind torch's file, before its digest
ARCHIVE = b"PK\x03\x04"  # what torch's files begin with


class DamagedCheckpointError(UserError):
    pass


def save(path: Path, state: dict[str, Any]) -> None:
    content = pack({"format_version": FORMAT_VERSION, "written_by": __version__} | state)
    write_atomically(path, content + MARK + hashlib.sha256(content).digest())


def pack(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint that this program wrote, whole. Anything else is refused before any of it is interpreted."""
    return parse(read(path), path)


def read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(f"{path} is a directory; give a checkpoint file.{_others_there(path / 'x')}")
    if not path.is_file():
        raise UserError(f"Checkpoint {path} does not exist.{_others_there(path)}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES >> 30} GiB: no checkpoint of this program.")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"Checkpoint {path} cannot be read ({error.strerror or error}).") from None


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """The content of a checkpoint file, in today's form; `path` is for the sentence that refuses it."""
    content = checked(data, path)
    try:
        check_archive(content)
        try:
            state = unpack(content)
        except Exception:  # whatever a hostile file makes the reader throw
            raise FormatError("was refused: torch finds more in it than tensors and plain values") from None
        state = upgraded(state)
    except NewerFormatError as error:
        raise UserError(f"Checkpoint {path} {error}.") from None
    except FormatError as error:
        raise DamagedCheckpointError(f"Checkpoint {path} {error}.") from None
    return state | {"config": _config(state["config"], path)}


def _config(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Checked, and with the defaults of settings that the version which wrote it did not have."""
    try:
        return configs.to_dict(configs.build(data, {}, source="its config"))
    except UserError as error:
        sentence = str(error).splitlines()[0]
        raise UserError(f"Checkpoint {path} was made with other settings than this version knows: {sentence}") from None


def checked(data: bytes, path: Path) -> bytes:
    """What stands before the checksum, if that is right."""
    if not data:
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged: the file is empty.")
    if not data.startswith(ARCHIVE):
        raise DamagedCheckpointError(f"{path} is damaged, or no checkpoint of this program: it begins otherwise.")
    content, mark, digest = data.rpartition(MARK)
    if not mark:
        raise DamagedCheckpointError(
            f"Checkpoint {path} is damaged or cut short, or no checkpoint of this program: it has no checksum."
        )
    if hashlib.sha256(content).digest() != digest:
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged or cut short: its checksum is wrong.")
    return content


def newest(directory: RunDirectory, warn: Callable[[str], None] = print) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint of a run, None if there is none yet.

    Damaged ones are reported and put out of the way; that none is good any more is an error, not a new beginning.
    """
    found, damaged = [], 0
    for path in [directory.final_checkpoint(), *directory.step_checkpoints()]:
        if not path.exists():
            continue
        try:
            found.append((path, load(path)))
        except DamagedCheckpointError as error:
            damaged += 1
            path.rename(path.with_suffix(".pt.damaged"))
            warn(f"Warning: {error} It is now called {path.name}.damaged; trying the one before it.")
            continue
        if path != directory.final_checkpoint():
            break
    if damaged and not found:
        raise UserError(
            f"No checkpoint in {directory.checkpoints} can be read any more; --overwrite starts the run anew, "
            "another --output-dir leaves it as it is."
        )
    return max(found, key=lambda item: item[1]["progress"]["steps"], default=None)


def prune(directory: RunDirectory, keep: int) -> None:
    """Called when a newer one is complete and on the disk: the newest `keep` stay."""
    for path in directory.step_checkpoints()[keep:]:
        path.unlink(missing_ok=True)


def _others_there(path: Path) -> str:
    others = sorted(file.name for file in path.parent.glob("*.pt")) if path.parent.is_dir() else []
    return f" In {path.parent} there are: {', '.join(others)}." if others else ""
