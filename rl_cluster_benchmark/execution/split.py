"""How many cores act and how many learn: by what a step costs each, measured here with the run's own network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from rl_cluster_benchmark import config_files, hardware
from rl_cluster_benchmark.algorithms.impala import Impala, Unrolls
from rl_cluster_benchmark.algorithms.reduction import Alone
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.envs import make_env
from rl_cluster_benchmark.models import make_model
from rl_cluster_benchmark.rollout import Collector
from rl_cluster_benchmark.timing import PhaseClock

SECONDS = 2.0  # to measure the costs for, at least
FEWEST_CALLS = 4
SAMPLED_STEPS = 16


@dataclass(frozen=True)
class Costs:
    """Seconds of one core for one environment step."""

    act: float
    learn: float


def fill_in(config: Config) -> Config:
    """Decide whatever the config leaves open: the actors are then in parallel.num_workers."""
    cores = hardware.detect().usable_cores
    actors: int | str = config.impala.num_actors or config.parallel.num_workers or "auto"
    learners: int | str = config.impala.num_learners
    if not isinstance(actors, int):
        if isinstance(learners, int):
            actors = max(1, cores - learners)
        else:
            actors, learners = (1, 1) if cores <= 2 else _measured(config, cores)
    data = config.model_dump()
    per_actor = config.parallel.num_envs_per_worker
    num_envs = actors * per_actor if per_actor is not None else config.env.num_envs  # of all machines, if several
    if not isinstance(learners, int):
        learners = max(1, min(cores - actors, num_envs))
    data["impala"] |= {"num_actors": None, "num_learners": learners}
    data["parallel"]["num_workers"] = actors
    if config.mode == "parallel":  # machines that meet find out together how many environments they have
        data["env"]["num_envs"] = num_envs
    return config_files.build(data, {}, source="config")


def _measured(config: Config, cores: int) -> tuple[int, int]:
    num_envs = config.parallel.num_envs_per_worker or max(1, config.env.num_envs * 3 // cores)
    costs = measure(config, num_envs)
    fresh = 1 - config.impala.replay_fraction
    machines = config.cluster.num_workers if config.mode == "distributed" else 1
    actors, learners = split(costs, cores, max(1, config.unrolls_per_step // machines), fresh)
    print(
        f"Split of {cores} cores: {actors} actors, {learners} learners (a step costs {1e3 * costs.act:.2f} ms to take "
        f"and {1e3 * costs.learn / fresh:.2f} ms to learn from)",
        flush=True,
    )
    return actors, learners


def split(costs: Costs, cores: int, unrolls: int, fresh: float = 1.0) -> tuple[int, int]:
    """(actors, learners) with the most steps per second, when a learner's step takes so many unrolls.

    Learners take unrolls one after the other, and at the end of a step each waits for half of one on average.
    """

    def rate(actors: int) -> float:
        learners = cores - actors
        busy = unrolls / (unrolls + learners / 2)
        return min(actors / costs.act, learners * busy * fresh / costs.learn)

    actors = max(range(1, cores), key=rate)
    return actors, cores - actors


def measure(config: Config, num_envs: int) -> Costs:
    """With one thread, as an actor and a learner have."""
    plan = hardware.plan(config)
    env = make_env(config.env, range(num_envs), num_threads=1)
    acting, learning = (
        make_model(config.model, env.observation_shape, env.num_actions, config.hardware, precision, engine)
        for precision, engine in (hardware.acting(config, plan), (hardware.dtype(plan.precision), plan.engine))
    )
    n_steps = min(SAMPLED_STEPS, config.training.n_steps)
    collector = Collector(
        env, acting, n_steps=n_steps, env_ids=range(num_envs), seed=0, device="cpu", clock=PhaseClock()
    )
    rollout = collector.collect_unroll(0, lambda: False)
    assert rollout is not None
    impala = Impala(config, learning, env_ids=(), micro_batch=plan.micro_batch, reduce=Alone())
    together = max(1, min(num_envs, plan.micro_batch // n_steps))
    unrolls = Unrolls.of(rollout, list(range(together)), torch.zeros_like(rollout.rewards))
    act, learn = _seconds(lambda: collector.collect_unroll(1, lambda: False), lambda: impala.step(unrolls, 0.0))
    return Costs(act / (n_steps * num_envs), learn / (n_steps * together))


def _seconds(*works: Callable[[], object]) -> list[float]:
    """Of one call of each: medians of calls in turns, the first ones not counted, so that a hitch decides nothing."""
    taken: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(taken[-1]) < FEWEST_CALLS:
        for work, seconds in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return [median(seconds[1:]) for seconds in taken]
