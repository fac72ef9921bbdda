"""IMPALA on the cores of one machine: actors that only act, learners that only learn, neither waiting for the other
while there is something to do.

Actors fill unrolls in shared memory (unrolls.py) with the newest weights (weights.py). Learners are data-parallel: of
the unrolls of a step each takes the next when it is ready for one, so that a slow core holds up nobody, and their
gradients are summed as in data_parallel.py. The parent only watches, writes files, and replaces actors that die.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl_cluster_benchmark import hardware
from rl_cluster_benchmark.algorithms.impala import Impala
from rl_cluster_benchmark.algorithms.learner import move_parameters
from rl_cluster_benchmark.algorithms.rewards import DiscountedReturns
from rl_cluster_benchmark.config import Config
from rl_cluster_benchmark.envs import make_env
from rl_cluster_benchmark.execution import times
from rl_cluster_benchmark.execution.claims import Claims
from rl_cluster_benchmark.execution.data_parallel import SMALL_SPARE, VECTOR_SPARE, give_orders, gloo_store
from rl_cluster_benchmark.execution.leader import Board, Leader
from rl_cluster_benchmark.execution.lessons import Lessons
from rl_cluster_benchmark.execution.loop import build_algorithm, state_of
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer, join
from rl_cluster_benchmark.execution.replay import ReplayFile
from rl_cluster_benchmark.execution.shared import SharedTensors
from rl_cluster_benchmark.execution.task import Task, deal
from rl_cluster_benchmark.execution.unrolls import UnrollStore, unroll_layout
from rl_cluster_benchmark.execution.waiting import wait_until
from rl_cluster_benchmark.execution.weights import PublishedWeights
from rl_cluster_benchmark.execution.workers import WorkerPool, end_of
from rl_cluster_benchmark.hardware import Plan
from rl_cluster_benchmark.kernels import pooling
from rl_cluster_benchmark.models import make_model
from rl_cluster_benchmark.rollout import Collector
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run
from rl_cluster_benchmark.seeding import integer_seed, stream
from rl_cluster_benchmark.timing import PhaseClock

INCARNATIONS = 2**24  # of environments: more than a run has updates


class Shared:
    """What the processes of a run share. Handed to a spawned process, it is the same there."""

    def __init__(self, config: Config, plan: Plan, folder: Path, resumed_path: Path | None) -> None:
        self.config, self.plan, self.folder, self.resumed_path = config, plan, folder, resumed_path
        self.task = Task.of(config)
        self.shards = deal(config.env.num_envs, plan.num_workers)
        self.num_learners = plan.num_learners
        size = self.task.num_parameters
        self.flags = SharedTensors(
            {
                "order": ((1,), torch.int64),
                "go": ((1,), torch.int64),
                **Board.layout(config),
                **times.layout(self.num_learners + len(self.shards)),
            }
        )
        self.unrolls = UnrollStore.allocate(
            self.task,
            num_actors=len(self.shards),
            envs_per_actor=max(map(len, self.shards)),
            n_steps=config.training.n_steps,
            pages_per_actor=config.impala.pages_per_actor,
        )
        self.weights = PublishedWeights.allocate(size)
        self.claims = Claims()
        self._gloo = gloo_store() if config.parallel.reduce == "gloo" else None
        self.means: SharedTensors | int = (
            SharedMemoryReducer.allocate(self.num_learners, size + VECTOR_SPARE, SMALL_SPARE)
            if self._gloo is None
            else self._gloo.port
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_gloo": None}

    def board(self) -> Board:
        return Board(self.flags, self.num_learners, self.plan.micro_batch // self.config.training.n_steps)

    def store(self) -> UnrollStore:
        return UnrollStore(self.unrolls, self.shards)

    def name(self, rank: int) -> str:
        return f"Learner {rank}" if rank < self.num_learners else f"Actor {rank - self.num_learners}"


def train(run: Run) -> None:
    """In the parent: start actors and learners, write down what they report, tell them when to stop."""
    shared = Shared(run.config, run.plan, run.directory.root, run.resumed_path)
    flags, num_learners = shared.flags, shared.num_learners
    progress, seconds_before = run.progress_state(), dict(run.clock.seconds)
    restarts_before = int(run.asynchrony.summary().get("actor_restarts", 0))
    episodes: list[tuple[float, int]] = []
    restarts = 0

    def replace(rank: int, how: str) -> tuple[Any, ...] | None:
        nonlocal restarts
        if rank >= num_learners and shared.board().stopped:
            return None  # the run is ending anyway
        if rank < num_learners or not int(flags["go"][0]):
            raise end_of(shared.name(rank), how)
        if restarts == run.config.impala.max_actor_restarts:
            raise end_of(f"After {restarts} restarts (impala.max_actor_restarts) {shared.name(rank)}", how)
        restarts += 1
        print(f"{shared.name(rank)} {how.strip()}\nAnother takes its place.", flush=True)
        return shared, progress, restarts

    def record(steps: int, losses: dict[str, float], asynchrony: dict[str, float]) -> None:
        table = flags["times"]
        run.clock.seconds = times.mean_phases(table, seconds_before)
        run.worker_cpu_seconds = times.cpu_seconds(table)
        asynchrony |= {
            "async/learner_idle": times.idle_share(table[:num_learners]),
            "async/actor_idle": times.idle_share(table[num_learners:]),
            "system/actor_restarts": float(restarts_before + restarts),
        }
        run.record(steps, episodes, losses, asynchrony)
        episodes.clear()

    num_processes = num_learners + len(shared.shards)
    with WorkerPool(_work, num_processes, (shared, progress, 0), run.plan.cores, replace) as pool:
        started: set[int] = set()
        for rank, (kind, content) in pool.messages(lambda: give_orders(run, flags["order"])):
            if kind == "started":
                what = f" with {len(shared.shards[rank - num_learners])} environments" if rank >= num_learners else ""
                print(f"{shared.name(rank)} started{' again' if rank in started else ''}{what}", flush=True)
                started.add(rank)
                if len(started) == num_processes and not int(flags["go"][0]):
                    run.start()
                    flags["go"][0] = 1
            elif kind == "episodes":
                episodes.extend(content)
            elif kind == "record":
                record(**content)
            elif kind == "save":
                run.save(checkpoint.unpack(content))
            elif kind == "final state":
                run.finish(checkpoint.unpack(content))


def _work(rank: int, connection: Connection, shared: Shared, progress: dict[str, Any], restarts: int) -> None:
    """In a worker."""
    hardware.prepare_process(shared.plan.num_threads)
    clock = PhaseClock()
    keeper = times.TimeKeeper(shared.flags["times"][rank], clock)
    if rank < shared.num_learners:
        _learn(rank, connection, shared, progress, keeper)
    else:
        _act(rank - shared.num_learners, connection, shared, progress, restarts, keeper)
    keeper.write()


def _start(connection: Connection, shared: Shared, keeper: times.TimeKeeper) -> None:
    """Time counts from when all are ready."""
    connection.send(("message", ("started", None)))
    go, board = shared.flags["go"].numpy(), shared.board()
    wait_until(lambda: bool(go[0]) or board.stopped, keeper.clock)
    keeper.start()


def _act(
    actor: int, connection: Connection, shared: Shared, progress: dict[str, Any], restarts: int,
    keeper: times.TimeKeeper,
) -> None:  # fmt: skip
    """Unroll after unroll with the newest weights, as long as there is a page to put them."""
    config, plan, store, board, clock = shared.config, shared.plan, shared.store(), shared.board(), keeper.clock
    pooling.available()  # checked before time counts
    env_ids = shared.shards[actor]
    incarnation = progress["updates"] + restarts * INCARNATIONS
    env = make_env(config.env, env_ids, num_threads=plan.num_threads, incarnation=incarnation)
    precision, engine = hardware.acting(config, plan)
    model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, precision, engine)
    flat = torch.zeros(shared.task.num_parameters)
    move_parameters(model, flat)
    seed = integer_seed(config.env.seed, "actor", progress["updates"], restarts)  # other actions than the one before
    collector = Collector(
        env, model, n_steps=config.training.n_steps, env_ids=env_ids, seed=seed, device="cpu", clock=clock
    )
    returns, weights = DiscountedReturns(len(env_ids), config.training.gamma), PublishedWeights(shared.weights)
    page: int | None = None

    def found_a_page() -> bool:
        nonlocal page
        page = store.free_page(actor)
        return page is not None or board.stopped

    _start(connection, shared, keeper)
    index = 0
    while True:
        wait_until(found_a_page, clock)
        if page is None:
            return
        with clock.phase("communication"):
            version = weights.read(flat)
            model.weights_changed()
        collector.rollout = store.rollout(actor, page)
        rollout = collector.collect_unroll(index, lambda: board.stopped)
        if rollout is None:
            return
        store.publish(actor, page, version=version, return_moments=returns.moments(rollout))
        index += 1
        keeper.write()
        if rollout.episodes:
            connection.send(("message", ("episodes", rollout.episodes)))


def _learn(
    rank: int, connection: Connection, shared: Shared, progress: dict[str, Any], keeper: times.TimeKeeper
) -> None:
    """Step after step on the unrolls that the leader, the first learner, hands out."""
    config, plan, task, clock = shared.config, shared.plan, shared.task, keeper.clock
    reduce = join(shared.means, rank, shared.num_learners, clock)
    state = checkpoint.load(shared.resumed_path) if shared.resumed_path else None
    model, algorithm = build_algorithm(
        config, plan, task.observation_shape, task.num_actions, env_ids=(), reduce=reduce, checkpoint=state
    )
    assert isinstance(algorithm, Impala)
    store, board = shared.store(), shared.board()
    lessons = Lessons(config, algorithm, board, shared.claims, store)
    if config.impala.replay_fraction > 0:
        share = -(-config.impala.replay_size // shared.num_learners)
        layout = unroll_layout(task, config.training.n_steps)
        lessons.replay_from(ReplayFile(shared.folder, share, layout), stream(config.env.seed, "replay", rank))
    leader = None
    if rank == 0:
        weights = PublishedWeights(shared.weights)
        weights.publish(algorithm.learner.flat)
        leader = Leader(
            config, shared.flags, board, shared.claims, store, weights, algorithm, connection, keeper,
            progress,
        )  # fmt: skip
    _start(connection, shared, keeper)
    step = 0
    while True:
        step += 1
        if leader is not None:
            leader.hand_out(clock)
        if not board.wait(step, clock):
            break
        with clock.phase("update"):
            losses = lessons.learn(clock)
        keeper.write()
        if leader is not None and leader.step_done(losses):
            leader.record()
            if leader.checkpoint_due():
                leader.save(state_of(model, algorithm, task.observation_shape, task.num_actions))
    if leader is not None:
        leader.record()
        leader.save(state_of(model, algorithm, task.observation_shape, task.num_actions), kind="final state")
