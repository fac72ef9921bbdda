"""Checkpoints: tensors and plain values only, written atomically, read without running any code in them.

A file is the output of torch.save, then a mark, then the SHA-256 of that output. checkpoint_format.py says what may be
in it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.atomic_files import open_plain, write_atomically
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run.checkpoint_format import (
    FORMAT_VERSION,
    MAX_BYTES,
    FormatError,
    NewerFormatError,
    check_archive,
    upgraded,
)
from rl_cluster_benchmark.run.directory import RunDirectory

MARK = b"RLCB-SHA256:"  # between torch's file and its digest
DIGEST_BYTES = hashlib.sha256().digest_size
ARCHIVE = b"PK\x03\x04"  # the first bytes of torch's files


class DamagedCheckpointError(UserError):
    """A checkpoint is cut short, changed, or not of this program; a run falls back to an older one."""


def save(path: Path, state: dict[str, Any]) -> str:
    """Write a checkpoint and return its digest."""
    return write(path, packed(state))


def packed(state: dict[str, Any]) -> bytes:
    """Return a state as bytes for `write`; the state may change afterwards."""
    return pack({"format_version": FORMAT_VERSION, "written_by": __version__} | state)


def write(path: Path, content: bytes) -> str:
    digest = hashlib.sha256(content)
    write_atomically(path, content + MARK + digest.digest())
    return digest.hexdigest()


def all_finite(value: Any) -> bool:
    """Return whether the numbers and tensors of a checkpoint's state contain no NaN and no infinity."""
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(all_finite(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return all(all_finite(inner) for inner in value)
    return not isinstance(value, float) or value - value == 0


def digest_at_end(data: bytes) -> str | None:
    """Return the digest at the end of a checkpoint's content (its last bytes are enough), or None without one."""
    end = data[-DIGEST_BYTES - len(MARK) :]
    return end[len(MARK) :].hex() if end.startswith(MARK) and len(end) == DIGEST_BYTES + len(MARK) else None


def digest_of(path: Path) -> str | None:
    """Return the digest at the end of a file without checking the rest; None if the file is missing or has none."""
    try:
        with open_plain(path) as file:
            file.seek(max(0, file.seek(0, 2) - DIGEST_BYTES - len(MARK)))
            return digest_at_end(file.read())
    except OSError:
        return None


def pack(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint that this program wrote; raise a UserError for any other or damaged file, before parsing it."""
    return parse(read(path), path)


def read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError(f"{path} is a directory; give a checkpoint file.{_others_there(_folder_of(path) / 'x')}")
    if not path.is_file():
        raise UserError(f"Checkpoint {path} does not exist.{_others_there(path)}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than {MAX_BYTES >> 30} GiB: no checkpoint of this program.")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"Checkpoint {path} cannot be read ({error.strerror or error}).") from None


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file in the current format; errors name `path`."""
    content = checked(data, path)
    try:
        check_archive(content)
        try:
            state = unpack(content)
        except Exception:  # a hostile file may make the reader raise anything
            raise FormatError("was refused: torch finds more in it than tensors and plain values") from None
        state = upgraded(state)
    except NewerFormatError as error:
        raise UserError(f"Checkpoint {path} {error}.") from None
    except FormatError as error:
        raise DamagedCheckpointError(f"Checkpoint {path} {error}.") from None
    return state | {"config": _config(state["config"], path)}


def _config(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint's config, checked, with defaults for settings that are newer than the checkpoint."""
    try:
        return configs.to_dict(configs.build(data, {}, source="its config"))
    except UserError as error:
        sentence = str(error).splitlines()[0]
        raise UserError(f"Checkpoint {path} was made with other settings than this version knows: {sentence}") from None


def checked(data: bytes, path: Path) -> bytes:
    """Return what precedes the checksum; raise DamagedCheckpointError if the checksum is missing or wrong."""
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


def newest(
    directory: RunDirectory, warn: Callable[[str], None] = print, *, put_aside: bool = True
) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and content of a run's newest good checkpoint, or None if none has been written yet.

    Damaged ones are reported and renamed, or skipped silently with `put_aside` false. If there are only damaged ones,
    raise a UserError: the run must not silently start anew.
    """
    found, damaged = [], 0
    for path in [directory.final_checkpoint(), *directory.step_checkpoints()]:
        if not path.exists():
            continue
        try:
            found.append((path, load(path)))
        except DamagedCheckpointError as error:
            damaged += 1
            if put_aside:
                path.rename(path.with_suffix(".pt.damaged"))
                warn(f"Warning: {error} It is now called {path.name}.damaged; trying the one before it.")
            continue
        except UserError:
            if path.exists():
                raise
            continue  # it was pruned meanwhile, by a run that is still going on
        if path != directory.final_checkpoint():
            break
    if damaged and not found:
        raise UserError(
            f"No checkpoint in {directory.checkpoints} can be read any more; --overwrite starts the run anew, "
            "another --output-dir leaves it as it is."
        )
    return max(found, key=lambda item: item[1]["progress"]["steps"], default=None)


def check_own(directory: RunDirectory) -> None:
    """Raise a UserError if the checkpoints belong to a run in another directory: they must not be removed or resumed.

    Without --output-dir, runs of one algorithm and mode keep checkpoints in the same place, whatever their --log-dir.
    """
    try:
        found = newest(directory, put_aside=False)
    except UserError:
        return
    other = RunDirectory.of(configs.build(found[1]["config"], {}, source=str(found[0]))) if found else directory
    is_elsewhere = other.root.resolve() != directory.root.resolve() and other.config.is_file()
    if is_elsewhere and other.checkpoints.resolve() == directory.checkpoints.resolve():
        raise UserError(
            f"The checkpoints in {directory.checkpoints} are of the run in {other.root}, not of {directory.root}: "
            "choose another --checkpoint-dir, or give --output-dir instead of --log-dir."
        )


def prune(directory: RunDirectory, keep: int) -> None:
    """Remove all but the newest `keep` step checkpoints; called once a newer one is complete and on the disk."""
    for path in directory.step_checkpoints()[keep:]:
        path.unlink(missing_ok=True)


def _folder_of(path: Path) -> Path:
    """Return the folder with the checkpoints of a run's directory: its `checkpoints`, or itself without one."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def _others_there(path: Path) -> str:
    others = sorted(file.name for file in path.parent.glob("*.pt")) if path.parent.is_dir() else []
    return f" In {path.parent} there are: {', '.join(others)}." if others else ""
