"""Procgen (and two toy environments) through EnvPool, behind one small vector-env interface.

EnvPool resets on the *next* step: after an episode ends, `step` returns its true last frame, and the following `step`
ignores the action and returns the first frame of a new episode. That extra transition is not experience; code that
steps a `VectorEnv` masks it out (see experience/rollout.py).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rl_cluster_benchmark.config.schema import MAX_LEVEL, EnvConfig
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.seeding import integer_seed

Levels = Literal["train", "test", "all"]


class Step(NamedTuple):
    observations: NDArray  # [N, *observation_shape]
    rewards: NDArray[np.float32]  # [N]
    terminated: NDArray[np.bool_]  # [N] the episode ended: the value of what follows is zero
    truncated: NDArray[np.bool_]  # [N] the episode was cut off: its last frame still has a value


class Spaces(Protocol):
    @property
    def num_actions(self) -> int: ...

    @property
    def observation_shape(self) -> tuple[int, ...]: ...

    @property
    def observation_dtype(self) -> np.dtype: ...


class KnownSpaces(NamedTuple):
    num_actions: int
    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype


PROCGEN = KnownSpaces(15, (64, 64, 3), np.dtype(np.uint8))  # all games


class VectorEnv(Protocol):
    num_envs: int
    num_actions: int
    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype

    def reset(self) -> NDArray: ...

    def step(self, actions: NDArray[np.int32]) -> Step: ...


class EnvPoolEnv:
    """N copies of one environment, stepped together by EnvPool's C++ threads."""

    def __init__(self, task: str, seeds: Sequence[int], num_threads: int, options: dict[str, object]) -> None:
        envpool = load_envpool()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gymnasium warns about float32 boxes
            try:
                self._pool = envpool.make(
                    task,
                    env_type="gymnasium",
                    num_envs=len(seeds),
                    env_seed=list(seeds),
                    num_threads=min(num_threads, len(seeds)),
                    **options,
                )
            except (RuntimeError, MemoryError) as error:
                raise TrainingFailedError(
                    f"The environments could not be started ({error}); is this machine out of memory, or of threads "
                    "(ulimit -v, ulimit -u)?"
                ) from None
            space = self._pool.observation_space
        self.num_envs = len(seeds)
        self.num_actions = int(self._pool.action_space.n)
        self.observation_shape = tuple(space.shape)
        self.observation_dtype = np.dtype(space.dtype)

    def reset(self) -> NDArray:
        observations, _ = self._pool.reset()
        return observations

    def step(self, actions: NDArray[np.int32]) -> Step:
        observations, rewards, terminated, truncated, _ = self._pool.step(actions)
        return Step(observations, rewards, terminated, truncated)


def make_env(
    config: EnvConfig,
    env_ids: Sequence[int],
    *,
    num_threads: int,
    levels: Levels = "train",
    incarnation: int = 0,
) -> EnvPoolEnv:
    """Make the environments numbered `env_ids` of the run, each with its own seed.

    A resumed run passes another `incarnation`, so that it meets new levels instead of those it began with.
    """
    seeds = [integer_seed(config.seed, "env", env_id, incarnation) for env_id in env_ids]
    if config.game is None:
        return EnvPoolEnv(config.name, seeds, num_threads, {})
    start_level, num_levels = level_range(config, levels)
    options: dict[str, object] = {
        "channel_first": False,
        "num_levels": num_levels,
        "start_level": start_level,
        "use_sequential_levels": config.use_sequential_levels,
        "center_agent": config.center_agent,
        "use_backgrounds": config.use_backgrounds,
        "use_monochrome_assets": config.use_monochrome_assets,
        "restrict_themes": config.restrict_themes,
        "use_generated_assets": config.use_generated_assets,
        "paint_vel_info": config.paint_vel_info,
    }
    return EnvPoolEnv(
        f"{config.game.capitalize()}{config.distribution_mode.capitalize()}-v0", seeds, num_threads, options
    )


def level_range(config: EnvConfig, levels: Levels) -> tuple[int, int]:
    """Return Procgen's (start_level, num_levels); num_levels 0 means every level there is.

    `test` is every level above the training set, none of which was trained on. `all` is the test of the published
    protocol, which contains the training levels (200 of two thousand million).
    """
    if levels == "all" or config.num_levels == 0:
        return 0, 0
    if levels == "train":
        return config.start_level, config.num_levels
    first_unseen = config.start_level + config.num_levels
    return first_unseen, MAX_LEVEL - first_unseen


@cache
def load_envpool():  # type: ignore[no-untyped-def]
    """Import EnvPool with the Qt libraries that its Procgen needs; raise a UserError that says what is missing."""
    if sys.version_info < (3, 12):
        _load_qt()
    # By default EnvPool imports all its games, some of them with matplotlib, which takes a second.
    sys.modules.setdefault("envpool.entry", ModuleType("envpool.entry"))
    try:
        import envpool

        for family in ("classic_control", "procgen", "toy_text"):
            importlib.import_module(f"envpool.{family}.registration")
    except ImportError as error:
        raise UserError(f"EnvPool cannot be imported ({error}); {_remedy(str(error))}.") from None
    return envpool


def _load_qt() -> None:
    """Load Qt 5 from the wheel PyQt5-Qt5: EnvPool's wheels for Python 3.11 link to it but do not contain it."""
    spec = importlib.util.find_spec("PyQt5")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("Procgen needs Qt 5 on Python 3.11; run: pip install PyQt5-Qt5.")
    folder = Path(next(iter(spec.submodule_search_locations))) / "Qt5" / "lib"
    libraries = ("libicudata.so.56", "libicuuc.so.56", "libicui18n.so.56", "libQt5Core.so.5", "libQt5Gui.so.5")
    for library in libraries:
        try:
            ctypes.CDLL(str(folder / library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UserError(f"Qt's {library} cannot be loaded ({error}); {_remedy(str(error))}.") from None


def _remedy(message: str) -> str:
    if "libGL" in message:
        return "install the system library libGL.so.1 (Debian, Ubuntu: apt-get install libgl1; Fedora: mesa-libGL)"
    if "libglib" in message or "libgthread" in message:
        return "install the system library glib (Debian, Ubuntu: apt-get install libglib2.0-0)"
    return "run: pip install -r requirements.txt"
