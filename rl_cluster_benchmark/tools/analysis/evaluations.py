"""The evaluations beside a run: which are of it. One of another agent, or of what the run was before, is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.directory import CLIPS, RunDirectory
from rl_cluster_benchmark.tools.analysis.run_files import (
    Amount,
    Checkpoint,
    Count,
    LeftOut,
    Number,
    Summary,
    Text,
    UnusableRunError,
    first_problem,
    is_inside,
    read_inside,
)
from rl_cluster_benchmark.tools.evaluation.video import mark_of_clip

NOT_PLAYED = ("seed", "num_envs")  # of the section env: an evaluation has a seed of its own, and its own number
ANY_NAME = ("eval*.json",)
NOT_COMPARABLE = (
    "that cannot be compared with the run's last: its checkpoints are not in its directory, and its summary names none"
)
MAX_FILES = 100  # evaluations in a directory
MAX_CLIP = 3_000_000  # bytes
UNKNOWN = "does not say which checkpoint it is of; evaluate again"
CLIP_TYPES = {b"GIF8": "image/gif", b"RIFF": "image/webp"}


class Origin(BaseModel):
    """What an evaluation is of."""

    policy: Literal["trained", "random"]
    checkpoint: Checkpoint
    run_id: Text | None = None
    env: dict[str, Any]
    git_commit: Text | None = None
    versions: dict[str, Text] = {}


class Evaluation(BaseModel):
    """What `rlcb evaluate --json` writes."""

    mean_reward: Number
    std_reward: Amount
    min_reward: Number
    max_reward: Number
    mean_length: Amount
    std_length: Amount
    num_episodes: Annotated[Count, Field(ge=1)]
    ci95: tuple[Number, Number]
    normalized_score: Number | None = None
    levels: Literal["train", "test", "all"]
    seed: int = 0
    deterministic: bool = False
    env: str
    origin: Origin | None = None  # older files do not say


def how_played(found: Sequence[Evaluation]) -> tuple[str, str]:
    """Return (number of episodes, how actions were chosen) of some evaluations, in words."""
    fewest, most = (pick(evaluation.num_episodes for evaluation in found) for pick in (min, max))
    ways = {"the likeliest action" if evaluation.deterministic else "sampled actions" for evaluation in found}
    how = ways.pop() if len(ways) == 1 else "sampled actions in some, the likeliest action in others"
    return str(most) if fewest == most else f"{fewest} to {most}", how


def load_evaluations(
    path: Path, config: Config, summary: Summary, *, has_ended: bool = True, names: Sequence[str] = ANY_NAME
) -> tuple[dict[str, Evaluation], list[LeftOut]]:
    """Return the evaluations that are of a run, by their levels, and those, and a clip, that are not.

    Of several on the same levels it is one that names its checkpoint, then the one with most episodes.
    A run that goes on, or was killed (`has_ended` is false), has the newest checkpoint that is there.
    """
    last = last_checkpoint(path, config, summary)
    found: dict[str, Evaluation] = {}
    left_out: list[LeftOut] = []
    for file in sorted({file for name in names for file in path.glob(name)})[:MAX_FILES]:
        try:
            evaluation = _read(path, file)
            if evaluation is None:
                continue  # another program's file
            if evaluation.origin is None and not has_ended:
                raise UnusableRunError(UNKNOWN)
            _require_of_run(evaluation, config, summary, last)
        except UnusableRunError as error:
            left_out.append(LeftOut(file, str(error)))
            continue
        known = found.get(evaluation.levels)
        if known is None or _rank(known) < _rank(evaluation):
            found[evaluation.levels] = evaluation
    try:
        load_clip(path, config, summary)
    except UnusableRunError as error:
        left_out.append(LeftOut(path, str(error)))
    return found, left_out


def _rank(evaluation: Evaluation) -> tuple[bool, int]:
    return evaluation.origin is not None, evaluation.num_episodes


def _read(path: Path, file: Path) -> Evaluation | None:
    content = read_inside(path, file) or b""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise UnusableRunError("is damaged") from None
    if not isinstance(data, dict) or "mean_reward" not in data:
        return None
    try:
        return Evaluation.model_validate(data)
    except ValidationError as error:
        raise UnusableRunError(f"is damaged ({first_problem(error)})") from None


def last_checkpoint(path: Path, config: Config, summary: Summary) -> Checkpoint | None:
    """Return what the run ended with: as its summary says, or else, of the files that there are, the newest one.

    A final one may be older than those of steps: a run that had finished may have gone on since.
    """
    if summary.checkpoint is not None:
        return summary.checkpoint
    directory = RunDirectory.of(config.model_copy(update={"output_dir": str(path)}))
    final = _named(path, directory.final_checkpoint(), summary.total_timesteps)
    if final is not None and summary.state == "finished":
        return final
    steps = (_named(path, file, int(file.stem.rpartition("_")[2])) for file in directory.step_checkpoints())
    newest = next((found for found in steps if found is not None), None)
    made = _steps_in(directory.final_checkpoint(), final.digest) if final is not None else None
    if newest is not None and (made is None or made < newest.steps):
        return newest
    return final if final is None or made is None else Checkpoint(digest=final.digest, steps=made)


def _named(path: Path, file: Path, steps: float) -> Checkpoint | None:
    """Return how a checkpoint of the run at `path` is named; None if there is none in this file."""
    digest = checkpoint.digest_of(file) if is_inside(path, file) else None
    return Checkpoint(digest=digest, steps=steps) if digest is not None else None


@lru_cache
def _steps_in(file: Path, digest: str) -> int | None:
    """Return after how many steps the checkpoint with this digest was written; None if it cannot be read."""
    try:
        steps: int = checkpoint.load(file)["progress"]["steps"]
    except UserError:
        return None
    return steps


def _require_of_run(evaluation: Evaluation, config: Config, summary: Summary, last: Checkpoint | None) -> None:
    """Raise unless the evaluation is of the agent that the run ended with, on the run's own task."""
    origin = evaluation.origin
    if evaluation.env != config.env.name:
        raise UnusableRunError(f"is of {evaluation.env}, the run of {config.env.name}")
    if origin is None:
        if summary.run_id is not None:
            raise UnusableRunError(UNKNOWN)
        return
    if origin.policy == "random":
        raise UnusableRunError("is of a random policy, not of the run's agent")
    for key, value in config.env.model_dump().items():
        if key not in NOT_PLAYED and origin.env.get(key, value) != value:
            raise UnusableRunError(
                f"was played with env.{key} = {str(origin.env[key])[:40]}, the run has {value}; evaluate again"
            )
    if last is None:
        if summary.run_id is None and origin.run_id is None and origin.checkpoint.steps == summary.total_timesteps:
            return  # an older run without --output-dir: its checkpoints are elsewhere, and its summary names none
        raise UnusableRunError(f"is of a checkpoint (at {origin.checkpoint.steps:,.0f} steps) {NOT_COMPARABLE}")
    if origin.checkpoint.digest != last.digest:
        raise UnusableRunError(
            f"is of another checkpoint (at {origin.checkpoint.steps:,.0f} steps; "
            f"the run's last is at {last.steps:,.0f}); evaluate again"
        )


def load_clip(path: Path, config: Config, summary: Summary) -> tuple[str, bytes] | None:
    """Return (type, content) of the first clip that shows the run's agent, None if there is no clip.

    Raise UnusableRunError, with what is wrong with the first one, if there are clips and none shows it.
    """
    problem = None
    for name in CLIPS:
        try:
            content = read_inside(path, path / name, limit=MAX_CLIP, too_large="too large for a page")
            kind = CLIP_TYPES.get(content[:4]) if content else None
            if content is not None and kind is not None:
                _require_clip_of_run(name, content, summary, last_checkpoint(path, config, summary))
                return kind, content
        except UnusableRunError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def _require_clip_of_run(name: str, content: bytes, summary: Summary, last: Checkpoint | None) -> None:
    """Raise unless the clip shows the agent that the run ended with, or is of an older version, as the run is."""
    mark = mark_of_clip(content)
    if mark is None:
        if summary.run_id is not None:
            raise UnusableRunError(f"{name} does not say which checkpoint it shows; record it again")
        return
    digest, policy = mark
    if policy == "trained" and last is None:
        raise UnusableRunError(f"{name} shows a checkpoint {NOT_COMPARABLE}")
    if policy != "trained" or last is None or digest != last.digest:
        raise UnusableRunError(f"{name} does not show the run's last checkpoint; record it again")
