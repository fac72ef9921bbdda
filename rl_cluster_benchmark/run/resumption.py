"""Checks for --resume: whether there is a run to go on with, and whether the command asks for the run's own task.

Nothing here writes or locks, so a mistake is found before anything of the run is touched.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import MAY_CHANGE, Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.directory import RunDirectory

# Files by which other things than runs are recognised, and the words for an error message.
NOT_A_RUN = {
    "benchmark.yaml": "it holds a benchmark, which `rlcb benchmark --resume` goes on with",
    "scaling.json": "it holds the results of `rlcb scaling`",
    "projection.json": "it holds the results of `rlcb scaling --project`",
    "tune.json": "it holds the results of `rlcb tune`",
}
MOST_NAMED = 5  # other runs that an error message names


def check(config: Config, directory: RunDirectory, *, must_exist: bool) -> Config | None:
    """Return the config with which the run in `directory` goes on, or None if there is no run.

    Raise a UserError if there is no run but must be one, or if the config asks for another task than the run's.
    """
    if not directory.holds_a_run():
        if must_exist or directory.metrics_log.exists():
            raise UserError(_no_run(directory))
        return None
    written = configs.load(directory.config, configs.AS_IT_WAS) if directory.config.is_file() else None
    found = checkpoint.newest(directory, put_aside=False)
    if written is None:
        checkpoint.check_own(directory)
    saved = configs.build(found[1]["config"], {}, source=str(found[0])) if found is not None else None
    changed: dict[str, str] = {}
    for before in (written, saved):
        changed |= _changes(before, config) if before is not None else {}
    if changed:
        raise UserError(
            f"--resume goes on with the run in {directory.root} as it was started, but this asks for "
            f"{', '.join(f'{key} = {values}' for key, values in changed.items())}. Leave that out to go on with the "
            "run (--resume without --config takes the run's own settings), or start a new one in another --output-dir."
        )
    if saved is None:
        _check_that_none_was_saved(directory, written)
    before = saved or written
    assert before is not None
    return _with_its_environments(config, before)


def finished_with(directory: RunDirectory) -> int | None:
    """Return the number of updates that the run had when it finished; None if it has not."""
    summary = _summary(directory)
    return summary.get("total_updates") if summary.get("state") == "finished" else None


def remove_results_after(directory: RunDirectory, updates: int) -> None:
    """Remove what tells of updates that are about to be made again: nothing else would, if the run is killed."""
    for file in (directory.summary, directory.benchmark_metrics):
        made = _content(file).get("total_updates")
        if isinstance(made, int | float) and made > updates:
            directory.metrics.unlink(missing_ok=True)
            file.unlink()


def _changes(before: Config, now: Config) -> dict[str, str]:
    """Return the changes that a resumed run may not make: key -> `new value (it was old value)`."""
    found = {}
    old, new = (configs.to_dict(config) for config in (before, now))
    for config, data in ((before, old), (now, new)):
        if config.model.architecture == "auto":
            data["model"]["architecture"] = "impala" if config.env.game is not None else "mlp"
    for section, key, field in configs.fields():
        dotted = f"{section}.{key}" if section else key
        was, is_now = (data[section][key] if section else data[key] for data in (old, new))
        if section and now.algorithm not in configs.users(section, field):
            continue
        if was != is_now and MAY_CHANGE not in field.metadata and not _is_derived(dotted, before, now):
            found[dotted] = f"{_shown(is_now)} (it was {_shown(was)})"
    return found


def _is_derived(key: str, before: Config, now: Config) -> bool:
    """Return whether a key's change does not matter because the run keeps its number of environments anyway."""
    share, was = now.parallel.num_envs_per_worker, before.parallel.num_envs_per_worker
    if key == "env.num_envs":
        return not now.is_sequential and share is not None
    if key == "parallel.num_envs_per_worker":
        if not now.is_parallel or share is None:
            return True
        num_envs = _num_envs(now)
        return num_envs == before.env.num_envs or (num_envs is None and was is None)
    return False


def _with_its_environments(config: Config, before: Config) -> Config:
    """Return the config with the run's number of environments, whatever number of workers shares them now.

    Only in parallel mode: on several machines training/node.py does it, when all of them have met.
    """
    if not config.is_parallel or _num_envs(config) == before.env.num_envs:
        return config
    print(
        f"The run keeps its {before.env.num_envs} environments, whatever number of workers shares them; "
        f"parallel.num_envs_per_worker = {config.parallel.num_envs_per_worker} is left aside.",
        flush=True,
    )
    changes = {"env.num_envs": before.env.num_envs, "parallel.num_envs_per_worker": None}
    return configs.with_changes(config, changes, source="the run to resume")


def _num_envs(config: Config) -> int | None:
    """Return how many environments a run in parallel mode would have; None if this machine's cores decide."""
    share = config.parallel.num_envs_per_worker
    actors = config.impala.num_actors if config.traits.has_actors else None
    workers = actors or config.parallel.num_workers
    if share is None:
        return config.env.num_envs
    return workers * share if isinstance(workers, int) else None


def _check_that_none_was_saved(directory: RunDirectory, written: Config | None) -> None:
    """Raise a UserError if a run without checkpoints here once had some, or has some in another directory.

    A run that never had any may begin again.
    """
    summary = _summary(directory)
    places = [directory]
    if written is not None:
        own = RunDirectory.of(written)
        if own.root.resolve() == directory.root.resolve():
            places.append(own)
    had = summary.get("state") in ("finished", "interrupted") and summary.get("total_updates")
    damaged = [file for place in places for file in place.checkpoints.glob(f"{place.name}_*.pt.damaged")]
    if had or damaged or any(place.step_checkpoints() for place in places):
        if checkpoint.newest(directory, put_aside=False) is not None:
            return  # an earlier attempt that was still going on has meanwhile saved one, or pruned the one just seen
        raise UserError(
            f"The run in {directory.root} has saved checkpoints, but there is none in {directory.checkpoints}. Give "
            "the directories that it was started with (--output-dir, or --log-dir and --checkpoint-dir); --overwrite "
            "starts it anew."
        )


def _no_run(directory: RunDirectory) -> str:
    root = directory.root
    start = f"There is no run in {root} to resume"
    if root.is_file():
        return f"{start}: it is a file. Give the directory of the run."
    if not root.exists():
        why = "it does not exist"
    elif directory.metrics_log.exists():
        why = "it holds metrics, but neither config.yaml nor a checkpoint of it"
    else:
        why = next((text for file, text in NOT_A_RUN.items() if (root / file).is_file()), "it holds none")
    others = list(_runs_near(directory))
    if others:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        why += f"; there are runs in {', '.join(map(str, others[:MOST_NAMED]))}{more}"
    return f"{start}: {why}. Check the directory, or leave --resume out to start a run there."


def _runs_near(directory: RunDirectory) -> Iterator[Path]:
    """Yield runs below the directory, or beside it where its name is the algorithm's and mode's (--log-dir)."""
    above = directory.root.parent if directory.root == directory.logs else directory.root
    with contextlib.suppress(OSError):
        yield from sorted(path for path in above.iterdir() if (path / "config.yaml").is_file())


def _summary(directory: RunDirectory) -> dict[str, Any]:
    return _content(directory.summary)


def _content(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _shown(value: object) -> str:
    return configs.shown(value if isinstance(value, str) else json.dumps(value))
