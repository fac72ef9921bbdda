"""Checkpoints: tensors and plain values only, written whole or not at all, read without running any code in them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.files import write_atomically

FORMAT_VERSION = 1
REQUIRED = {
    "config": dict,
    "model": dict,
    "algorithm": dict,
    "progress": dict,
    "observation_shape": list,
    "num_actions": int,
}
MARK = b"RLCB-SHA256:"  # behind torch's file, before its digest


class DamagedCheckpointError(UserError):
    pass


def save(path: Path, state: dict[str, Any]) -> None:
    content = pack({"format_version": FORMAT_VERSION} | state)
    write_atomically(path, content + MARK + hashlib.sha256(content).digest())


def pack(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint that this program wrote, whole. Anything else is refused before any of it is interpreted."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; give a checkpoint file.{_others_there(path / 'x')}")
    if not path.is_file():
        raise UserError(f"Checkpoint {path} does not exist.{_others_there(path)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"Checkpoint {path} cannot be read ({error.strerror or error}).") from None
    content, mark, digest = data.rpartition(MARK)
    if not mark or hashlib.sha256(content).digest() != digest:
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged or cut short, or is no checkpoint.")
    try:
        state = unpack(content)
    except Exception:  # whatever a hostile file makes the reader throw
        raise DamagedCheckpointError(
            f"Checkpoint {path} was refused: it holds more than tensors and plain values; loading it could run code."
        ) from None
    if not isinstance(state, dict) or any(not isinstance(state.get(key), kind) for key, kind in REQUIRED.items()):
        raise DamagedCheckpointError(f"{path} is not a checkpoint of this program.")
    if state.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"Checkpoint {path} has format {state.get('format_version')}, this version reads {FORMAT_VERSION}; "
            "use the version of the program that wrote it."
        )
    return state


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
    for path in directory.step_checkpoints()[keep:]:
        path.unlink(missing_ok=True)


def _others_there(path: Path) -> str:
    others = sorted(file.name for file in path.parent.glob("*.pt")) if path.parent.is_dir() else []
    return f" In {path.parent} there are: {', '.join(others)}." if others else ""
