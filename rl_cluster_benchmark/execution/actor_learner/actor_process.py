"""A process that plays for IMPALA's learners."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.seeding import integer_seed
from rl_cluster_benchmark.env.environments import make_env
from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.messages import BadNumbers, EpisodesEnded
from rl_cluster_benchmark.experience.returns import DiscountedReturns
from rl_cluster_benchmark.experience.rollout import Collector, count_bad
from rl_cluster_benchmark.learning.learner import move_parameters
from rl_cluster_benchmark.learning.losses import left_out
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.waiting import wait_until

INCARNATIONS = 2**24  # of environments: more than a run has updates


def act(
    actor: int, connection: Connection, shared: Shared, progress: dict[str, Any], restarts: int,
    keeper: process_times.TimeKeeper,
) -> None:  # fmt: skip
    """Fill page after page with unrolls made with the newest weights, until the run ends."""
    config, plan, store, board, clock = shared.config, shared.plan, shared.store(), shared.board(), keeper.clock
    env_ids = shared.shards[actor]
    incarnation = progress["updates"] + restarts * INCARNATIONS
    try:
        env = make_env(config.env, env_ids, num_threads=plan.num_threads, incarnation=incarnation)
    except TrainingFailedError as error:
        if restarts == 0:
            raise
        raise RuntimeError(str(error)) from None  # of a replacement that is a crash like any: another takes its place
    precision, engine = planning.acting(config, plan)
    model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, precision, engine)
    flat = torch.zeros(shared.task.num_parameters)
    move_parameters(model, flat)
    seed = integer_seed(config.env.seed, "actor", progress["updates"], restarts)  # other actions than the one before
    collector = Collector(
        env, model, n_steps=config.training.n_steps, env_ids=env_ids, seed=seed, device="cpu", clock=clock,
        time_limit=config.training.time_limit,
    )  # fmt: skip
    returns, weights = DiscountedReturns(len(env_ids), config.training.gamma), PublishedWeights(shared.weights)
    page: int | None = None

    def found_a_page() -> bool:
        nonlocal page
        page = store.free_page(actor)
        return page is not None or board.stopped

    again = " again" if restarts else ""
    shared.start(connection, keeper, f"Actor {actor} started{again} with {len(env_ids)} environments")
    index = 0
    while True:
        wait_until(found_a_page, clock)
        if page is None:
            return
        with clock.phase("communication"):
            version = weights.read(flat)
            model.weights_changed()
        rollout = collector.collect_unroll(index, lambda: board.stopped, store.rollout(actor, page))
        if rollout is None:
            return
        index += 1
        is_bad, *counts = count_bad(rollout)
        if is_bad:  # the page stays free: nobody sees it
            shared.flags["left_out"][actor, 0] += rollout.num_steps
            bad = left_out(counts, config.training.on_nan)
            connection.send(BadNumbers(bad))
        else:
            store.publish(actor, page, version=version, return_moments=returns.moments(rollout))
        keeper.write()
        if rollout.episodes:
            connection.send(EpisodesEnded(list(rollout.episodes)))
