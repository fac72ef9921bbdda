"""Checkpoints: tensors and plain values only, written whole or not at all, read without running any code in them."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from rl_cluster_benchmark.errors import UserError
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.run.files import write_atomically

FORMAT_VERSION = 1
REQUIRED = ("format_version", "config", "model", "algorithm", "progress", "observation_shape", "num_actions")


class DamagedCheckpointError(UserError):
    pass


def save(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, pack({"format_version": FORMAT_VERSION} | state))


def pack(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), weights_only=True)


def load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"Checkpoint {path} does not exist.{_others_there(path)}")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # compares every part with its CRC-32
        if broken is not None:
            raise DamagedCheckpointError(f"Checkpoint {path} is damaged ({broken} has the wrong checksum).")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"Checkpoint {path} cannot be read ({error.strerror or error}).") from None
    except pickle.UnpicklingError:
        raise DamagedCheckpointError(
            f"Checkpoint {path} was refused: it holds more than tensors and plain values; loading it could run code."
        ) from None
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, KeyError):
        raise DamagedCheckpointError(f"Checkpoint {path} is damaged or cut short, or is no checkpoint.") from None
    if not isinstance(state, dict) or any(key not in state for key in REQUIRED):
        raise DamagedCheckpointError(f"{path} is not a checkpoint of this program.")
    if state["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"Checkpoint {path} has format {state['format_version']}, this version reads {FORMAT_VERSION}; "
            "use the version of the program that wrote it."
        )
    return state


def newest(directory: RunDirectory, warn: Any = print) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of a run that can be read; damaged ones are reported and passed over."""
    found = []
    for path in [directory.final_checkpoint(), *directory.step_checkpoints()]:
        if path.exists():
            try:
                found.append((path, load(path)))
            except DamagedCheckpointError as error:
                warn(f"Warning: {error} Trying the one before it.")
                continue
            if path != directory.final_checkpoint():
                break
    return max(found, key=lambda item: item[1]["progress"]["steps"], default=None)


def prune(directory: RunDirectory, keep: int) -> None:
    for path in directory.step_checkpoints()[keep:]:
        path.unlink(missing_ok=True)


def _others_there(path: Path) -> str:
    others = sorted(file.name for file in path.parent.glob("*.pt")) if path.parent.is_dir() else []
    return f" In {path.parent} there are: {', '.join(others)}." if others else ""
