"""What there is to choose from: ways to run one config that leave its learning problem alone, but for rounding.

A point of the space is one option of each group: who computes (layout), how (arithmetic), how much at a time
(micro-batch), and how much work goes to whoever is free (balance). Points that come to the same are one setting.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.config.traits import TRAITS, is_parallel, is_sequential
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.kernels import build
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.machine.detection import Machine

GROUPS = ("layout", "arithmetic", "micro-batch", "balance")
SPLIT_STEPS = (1, 2, 4)  # learners more or fewer than the measured split of the cores
# Keys that tuning may change; one that is given on the command line stays as it is.
KEYS = (
    "mode", "parallel.num_workers", "impala.num_actors", "impala.num_learners", "hardware.num_threads",
    "hardware.precision", "hardware.engine", "hardware.micro_batch", "parallel.balance",
)  # fmt: skip

Point = tuple[int, ...]  # an option's number for each group; all zeros is the config as it is


@dataclass(frozen=True)
class Layout:
    """Who computes: processes, their threads, and the environments."""

    mode: str
    workers: int  # of IMPALA: actors
    threads: int
    num_envs: int
    learners: int = 0

    def changes(self, algorithm: str) -> dict[str, object]:
        changes: dict[str, object] = {
            "mode": self.mode, "env.num_envs": self.num_envs, "parallel.num_envs_per_worker": None,
            "hardware.num_threads": self.threads,
        }  # fmt: skip
        if is_parallel(self.mode):
            changes["parallel.num_workers"] = self.workers
        if TRAITS[algorithm].has_actors and is_parallel(self.mode):
            changes |= {"impala.num_actors": None, "impala.num_learners": self.learners}
        return changes


@dataclass(frozen=True)
class TuningSetting:
    """One way to run the config, with everything decided."""

    layout: Layout
    precision: str
    engine: str
    micro_batch: int
    balance: float | None  # None where there is none
    learning: tuple[str, ...] = ()  # what it changes of the learning problem, in words
    changes: dict[str, Any] = field(default_factory=dict, compare=False)
    point: Point = field(default=(), compare=False)


class TuningSpace:
    """All settings that may be chosen for a config."""

    def __init__(
        self, config: Config, machine: Machine, *, fixed: Collection[str] = (), learning_too: bool = False
    ) -> None:
        """Find all settings of a config for one machine, of IMPALA with the split of the cores filled in.

        Keys that are `fixed` keep their values; `learning_too` lets the number of environments and of A3C's workers
        change.
        """
        self.config, self.machine, self.fixed, self.learning_too = config, machine, set(fixed), learning_too
        self.own = _own_layout(config)
        self.asked_batch = _whole_batch(config)
        self._options: list[list[dict[str, Any]]] = [
            [layout.changes(config.algorithm) for layout in self._layouts(self.own)],
            self._arithmetic(),
            self._micro_batches(),
            self._balances(),
        ]
        self.settings = self._all()
        self.default = self.settings[0]

    def variants(self, setting: TuningSetting, group: str) -> Iterator[TuningSetting]:
        """Yield the settings that differ from this one in one group alone."""
        place = GROUPS.index(group)
        for option in range(len(self._options[place])):
            point = (*setting.point[:place], option, *setting.point[place + 1 :])
            found = self._at(point)
            if found is not None and found in self.settings and found != setting:
                yield self.settings[self.settings.index(found)]

    def tuned(self, setting: TuningSetting) -> Config:
        """Return the config that `rlcb train --config` gets."""
        return config_files.with_changes(self.config, setting.changes, source="tuned config")

    def _all(self) -> list[TuningSetting]:
        points = itertools.product(*(range(len(options)) for options in self._options))
        found = dict.fromkeys(setting for point in points if (setting := self._at(point)) is not None)
        return list(found)

    def _at(self, point: Point) -> TuningSetting | None:
        """Return the setting at a point; None for options that this layout or this CPU has no use for."""
        changes = {k: v for group, option in zip(self._options, point, strict=True) for k, v in group[option].items()}
        factor = changes.pop("micro-batch factor", None)
        try:
            config = config_files.with_changes(self.config, changes, source="tuning")
            plan = planning.compiled(config, planning.plan(config))
            if factor is not None:
                changes["hardware.micro_batch"] = max(1, int(factor * plan.micro_batch))
                config = config_files.with_changes(config, changes, source="tuning")
                plan = planning.compiled(config, planning.plan(config))
        except UserError:
            if not any(point):
                raise
            return None
        layout = Layout(config.mode, plan.num_workers, plan.num_threads, config.env.num_envs, plan.num_learners)
        learning = tuple(self._learning_changes(config, plan))
        if (learning and any(point) and not self.learning_too) or self._breaks_a_fixed_key(changes):
            return None
        balance = plan.balance if self._balances_work(config) and plan.num_workers > 1 else None
        return TuningSetting(
            layout, plan.precision, plan.engine, plan.micro_batch, balance, learning, changes, tuple(point)
        )

    def _breaks_a_fixed_key(self, changes: dict[str, Any]) -> bool:
        if changes["mode"] != self.config.mode and self.fixed & {"mode", "parallel.num_workers"}:
            return True
        return any(changes[key] != value_of(self.config, key) for key in self.fixed & set(changes))

    def _learning_changes(self, config: Config, plan: planning.Plan) -> Iterator[str]:
        own = self.config
        if config.env.num_envs != own.env.num_envs:
            yield f"environments {own.env.num_envs} -> {config.env.num_envs}"
        if config.traits.is_lock_free and plan.num_workers != self.own.workers:
            yield f"A3C's workers {self.own.workers} -> {plan.num_workers}"
        if config.traits.has_actors and config.unrolls_per_step not in (
            self.asked_batch,
            own.unrolls_per_step,
        ):
            yield f"batch {self.asked_batch} -> {config.unrolls_per_step} unrolls"

    def _layouts(self, own: Layout) -> list[Layout]:
        if self.config.traits.has_actors:
            found = _splits(own, self.machine.usable_cores)
        elif self.config.traits.is_lock_free:
            counts = {self.machine.usable_cores, -(-self.machine.usable_cores // 2)} if self.learning_too else set()
            found = [dataclasses.replace(own, workers=workers, threads=1) for workers in sorted(counts)]
        else:
            found = _worker_layouts(own, self.machine, is_small=self.config.env.game is None)
        if self.learning_too:
            sizes = {2 * own.num_envs, own.num_envs // 2} - {0}
            found += [dataclasses.replace(each, num_envs=size) for each in [own, *found] for size in sorted(sizes)]
        return list(dict.fromkeys([own, *found]))

    def _arithmetic(self) -> list[dict[str, Any]]:
        options: list[dict[str, Any]] = [{}, {"hardware.engine": "torch"}]
        if self.config.hardware.precision == "auto" and build.wanted("bfloat16"):
            on_one_thread = config_files.with_changes(self.config, {"hardware.num_threads": 1}, source="tuning")
            chosen = planning.compiled(on_one_thread, planning.plan(on_one_thread)).precision
            options.append({"hardware.precision": "float32" if chosen == "bfloat16" else "bfloat16"})
        return options

    def _micro_batches(self) -> list[dict[str, Any]]:
        is_small = self.config.env.game is None  # the whole batch in one pass
        return [{}] if is_small else [{}, {"micro-batch factor": 0.5}, {"micro-batch factor": 2}]

    def _balances(self) -> list[dict[str, Any]]:
        shares = (0.0, 0.25, 0.5) if self._balances_work(self.config) else ()
        return [{}, *({"parallel.balance": share} for share in shares)]

    @staticmethod
    def _balances_work(config: Config) -> bool:
        return config.traits.is_in_step


def _own_layout(config: Config) -> Layout:
    """Return how `rlcb train` would run the config."""
    _, plan = planning.resolve(config)
    return Layout(config.mode, plan.num_workers, plan.num_threads, config.env.num_envs, plan.num_learners)


def _whole_batch(config: Config) -> int:
    """Return IMPALA's unrolls in a step before they are rounded to equal shares of the learners."""
    each = round(config.training.batch_size / config.training.n_steps)
    return max(1, min(each, config.env.num_envs))


def _worker_layouts(own: Layout, machine: Machine, *, is_small: bool) -> list[Layout]:
    """Return layouts for PPO and A2C: a process for each core, and fewer of several threads each, down to one.

    Vectors are so little work that idle cores may be faster.
    """
    cores = machine.usable_cores
    counts = [(cores, 1), (cores // 2, 2), (cores // 4, 4), (1, cores)]
    if is_small:
        counts += [(cores // 2, 1), (1, 1)]
    if machine.allowed_cores > cores and machine.cpu_quota is None:
        counts.append((machine.allowed_cores, 1))  # two threads of a core
    return [
        Layout("parallel" if workers > 1 else "sequential", workers, threads, own.num_envs)
        for workers, threads in counts
        if 1 <= workers <= own.num_envs and workers * threads <= machine.allowed_cores
    ]


def _splits(own: Layout, cores: int) -> list[Layout]:
    """Divide the cores between IMPALA's actors and learners, also with one process more than cores, as some wait."""
    if is_sequential(own.mode):
        counts = dict.fromkeys([cores, 1])
        return [dataclasses.replace(own, threads=threads) for threads in counts]
    total = max(2, cores)
    learners: Sequence[int] = [own.learners + sign * step for step in SPLIT_STEPS for sign in (1, -1)]
    powers = [2**i for i in range(total.bit_length())]  # these divide most batches
    pairs = [(total - n, n) for n in dict.fromkeys([*learners, *powers])]
    pairs += [(total + 1 - n, n) for n in (own.learners - 1, own.learners, own.learners + 1)]
    return [
        Layout("parallel", actors, 1, own.num_envs, n)
        for actors, n in pairs
        if actors >= 1 and n >= 1 and max(actors, n) <= own.num_envs
    ]


def value_of(config: Config, key: str) -> Any:
    """Return the value of `section.key`."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def resolve_envs(config: Config, machine: Machine) -> Config:
    """Return the config with the total of environments that `rlcb train` would make of it, and none per worker."""
    per_worker = config.parallel.num_envs_per_worker
    if not config.is_parallel or per_worker is None:
        return config
    workers = config.parallel.num_workers or machine.usable_cores
    changes = {
        "env.num_envs": per_worker * workers,
        "parallel.num_envs_per_worker": None,
        "parallel.num_workers": workers,
    }
    return config_files.with_changes(config, changes, source="config")
