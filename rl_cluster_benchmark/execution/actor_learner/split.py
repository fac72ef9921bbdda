"""How many cores act and how many learn: by what a step costs each, measured with the run's own network.

All cores measure at the same time: a core that works alone is faster, and more so for learning than for acting.

Where actors leave no core, learners share theirs: an actor that is far enough ahead waits, and a learner does its work
meanwhile. So it is on two cores with images: an actor with a core of its own would leave it idle for half of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import torch

from rl_cluster_benchmark.algorithms.impala import Impala, Unrolls
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PhaseClock, beat
from rl_cluster_benchmark.env.environments import make_env
from rl_cluster_benchmark.execution.actor_learner.leading_learner import group_size
from rl_cluster_benchmark.experience.rollout import Collector, Rollout
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.machine import detection, planning, process
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.processes.pool import WorkerPool

SECONDS = 2.0  # to measure the costs for, at least
FEWEST_CALLS = 4
SAMPLED_STEPS = 16
FEWEST_ACTORS = 16  # one in so many cores acts, at least


@dataclass(frozen=True)
class Costs:
    """How many seconds of one core an environment step takes."""

    act: Callable[[int], float]  # when there are so many actors: the network likes some numbers of environments more
    learn: float


def fill_in(config: Config, look: Callable[[], None] = lambda: None) -> Config:
    """Return the config with the split of the cores decided; `look` is called while it is measured, if it must be."""
    return planning.with_split(config, lambda cores: _measured(config, cores, look))


def _measured(config: Config, cores: int, look: Callable[[], None]) -> tuple[int, int]:
    fresh = (1 - config.impala.replay_fraction) / config.impala.passes
    machines = config.num_machines
    unrolls = max(1, config.unrolls_per_step // machines)
    costs = measure(config, cores, unrolls, SECONDS, machines, look)
    actors, learners = split(costs, cores, unrolls, fresh)
    print(
        f"Split of {cores} cores: {actors} actors, {learners} learners (a step costs {1e3 * costs.act(actors):.2f} ms "
        f"to take and {1e3 * costs.learn / fresh:.2f} ms to learn from)",
        flush=True,
    )
    return actors, learners


def split(costs: Costs, cores: int, unrolls: int, fresh: float = 1.0) -> tuple[int, int]:
    """Return the (actors, learners) with the most steps per second, when a learner's step takes so many unrolls.

    Learners take unrolls one after the other, and at the end of a step each waits for half of one on average.
    """

    def rate(actors: int) -> float:
        learners = cores - actors
        busy = unrolls / (unrolls + learners / 2)
        return min(actors / costs.act(actors), learners * busy * fresh / costs.learn)

    actors = max(_candidates(cores), key=rate)
    return actors, cores - actors


def _candidates(cores: int) -> range:
    return range(-(-cores // FEWEST_ACTORS), cores)


def measure(
    config: Config, cores: int, unrolls: int, seconds: float, machines: int = 1,
    look: Callable[[], None] = lambda: None,
) -> Costs:  # fmt: skip
    """Measure on all cores at once, with one thread each, as in a run; `look` is called now and then."""
    given = config.parallel.num_envs_per_worker
    sizes = {  # of each actor
        actors: given or -(-config.env.num_envs // (actors * machines)) for actors in _candidates(cores)
    }
    places = planning.places(config.parallel.pin, cores, 1, detection.detect())
    plan, in_order = planning.compiled(config, planning.plan(config)), sorted(set(sizes.values()))
    args = (config, plan, in_order, cores, unrolls, seconds)
    with WorkerPool(_measure, cores, args, places) as pool:
        found = [costs for _, costs in pool.messages(look)]
    learn, *act = (median(costs) for costs in zip(*found, strict=True))
    by_size = dict(zip(in_order, act, strict=True))
    return Costs(lambda actors: by_size[sizes[actors]], learn)


def _measure(
    rank: int, connection: Connection, config: Config, plan: Plan, sizes: Sequence[int], cores: int, unrolls: int,
    seconds: float,
) -> None:  # fmt: skip
    """Measure in a process of its own: environments as they are, the network for each number of them."""
    process.prepare_process(1)
    num_envs = sizes[len(sizes) // 2]
    env = make_env(config.env, range(num_envs), num_threads=1)
    acting, learning = (
        make_model(config.model, env.observation_shape, env.num_actions, config.hardware, precision, engine)
        for precision, engine in (planning.acting(config, plan), (process.dtype(plan.precision), plan.engine))
    )
    n_steps = min(SAMPLED_STEPS, config.training.n_steps)
    collector = Collector(
        env, acting, n_steps=n_steps, env_ids=range(num_envs), seed=0, device="cpu", clock=PhaseClock()
    )
    rollout = Rollout.allocate(n_steps, env)
    collector.collect_unroll(0, lambda: False, rollout)
    impala = Impala(config, learning, env_ids=(), micro_batch=plan.micro_batch, reduce=Alone())
    fit_the_cache = max(1, plan.micro_batch // config.training.n_steps)
    samples = group_size(unrolls, cores * 3 // 4, fit_the_cache) * config.training.n_steps
    together = max(1, min(num_envs, samples // n_steps))
    lesson = Unrolls.of(rollout, list(range(together)), torch.zeros_like(rollout.rewards))
    seen = torch.from_numpy(collector.observations)

    def ask(size: int) -> Callable[[], object]:
        observations = seen.repeat(-(-size // num_envs), *(1 for _ in env.observation_shape))[:size]
        return torch.inference_mode()(lambda: acting(observations))

    learn, act, *asked = _seconds(
        seconds,
        lambda: impala.step(lesson, 0.0),
        lambda: collector.collect_unroll(1, lambda: False, rollout),
        *map(ask, sizes),
    )
    answer = {size: taken / size for size, taken in zip(sizes, asked, strict=True)}
    act = act / (n_steps * num_envs) - answer[num_envs]
    connection.send([learn / (n_steps * together), *(act + answer[size] for size in sizes)])


def _seconds(seconds: float, *works: Callable[[], object]) -> list[float]:
    """Return the seconds of a call of each: the median of calls in turns without the first, as one may be slow."""
    taken: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[-1]) < FEWEST_CALLS:
        for work, calls in zip(works, taken, strict=True):
            start = time.perf_counter()
            work()
            calls.append(time.perf_counter() - start)
        beat()
    return [median(calls[1:]) for calls in taken]
