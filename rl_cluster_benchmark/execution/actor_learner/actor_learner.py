"""IMPALA on the cores of one machine: actors that only act, learners that only learn, neither waiting for the other
while there is something to do.

Actors fill unrolls in shared memory (unrolls.py) with the newest weights (weights.py). Learners are data-parallel: of
the unrolls of a step each takes the next when it is ready for one, so that a slow core holds up nobody, and their
gradients are summed as in data_parallel.py. The parent only watches, writes files, and replaces actors that die.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rl_cluster_benchmark.algorithms.impala import Impala
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.seeding import integer_seed, stream
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.env.environments import make_env
from rl_cluster_benchmark.execution.actor_learner.actor_learner_memory import Shared
from rl_cluster_benchmark.execution.actor_learner.leading_learner import LeadingLearner
from rl_cluster_benchmark.execution.actor_learner.replay import ReplayFile
from rl_cluster_benchmark.execution.actor_learner.unroll_learner import UnrollLearner
from rl_cluster_benchmark.execution.actor_learner.unrolls import unroll_layout
from rl_cluster_benchmark.execution.loop import build_algorithm, state_of
from rl_cluster_benchmark.execution.machines.machine_links import LostContactError, join_machines
from rl_cluster_benchmark.execution.machines.other_machines import (
    Corrections,
    IndependentMachines,
    MachinesInStep,
    OtherMachines,
)
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.execution.reports import give_orders
from rl_cluster_benchmark.experience.rewards import DiscountedReturns
from rl_cluster_benchmark.experience.rollout import Collector
from rl_cluster_benchmark.kernels import pooling
from rl_cluster_benchmark.learning import bad_numbers
from rl_cluster_benchmark.learning.learner import move_parameters
from rl_cluster_benchmark.learning.reduction import Reducer
from rl_cluster_benchmark.machine import planning, process
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.processes import process_times
from rl_cluster_benchmark.processes.pool import WorkerPool, end_of
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.waiting import wait_until
from rl_cluster_benchmark.processes.watchdog import limit_of
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.run import Run

INCARNATIONS = 2**24  # of environments: more than a run has updates


class Replacements:
    """What becomes of a process that died: another in its place if it was an actor, the end of the run if not."""

    def __init__(self, shared: Shared, progress: dict[str, Any]) -> None:
        self.shared, self.progress, self.count = shared, progress, 0

    def __call__(self, rank: int, how: str) -> tuple[Any, ...] | None:
        shared, most = self.shared, self.shared.config.impala.max_actor_restarts
        if rank >= shared.num_learners and shared.board().stopped:
            return None  # the run is ending anyway
        if rank < shared.num_learners or not int(shared.flags["go"][0]):
            raise end_of(shared.name(rank), how)
        if self.count == most:
            raise end_of(f"After {most} restarts (impala.max_actor_restarts) {shared.name(rank)}", how)
        self.count += 1
        print(f"{shared.name(rank)} {how.strip()}\nAnother takes its place.", flush=True)
        return shared, self.progress, self.count


class UpdateRecorder:
    """Writes down updates: with them the episodes that have ended, and where all processes spend their time."""

    def __init__(self, run: Run) -> None:
        self.run, self.episodes = run, list[tuple[float, int]]()
        self._seconds_before = dict(run.clock.seconds)
        self._waits_before = dict(run.asynchrony.waits)
        self._restarts_before = int(run.asynchrony.summary().get("actor_restarts", 0))

    def record(self, report: dict[str, Any], learners: Tensor, actors: Tensor, restarts: int) -> None:
        """`learners` and `actors`: a row of times for each."""
        everyone = torch.cat([learners, actors])
        self.run.clock.seconds = process_times.mean_phases(everyone, self._seconds_before)
        self.run.worker_cpu_seconds = process_times.cpu_seconds(everyone)
        asynchrony = report["asynchrony"] | {
            "async/learner_idle": self._idle("learner", learners),
            "async/actor_idle": self._idle("actor", actors),
            "system/actor_restarts": float(self._restarts_before + restarts),
        }
        self.run.record(report["steps"], self.episodes, report["losses"], asynchrony, report["at"])
        self.episodes.clear()

    def _idle(self, role: str, table: Tensor) -> float:
        """Return the share of their time, that before a resume included, which a role's processes have waited."""
        before = self._waits_before.get(role, [0.0, 0.0])
        waited, lived = (old + new for old, new in zip(before, process_times.waits(table), strict=True))
        self.run.asynchrony.waits[role] = [waited, lived]
        return waited / lived if lived > 0 else 0.0


def train(run: Run) -> None:
    """In the parent: start actors and learners, write down what they report, tell them when to stop."""
    shared = Shared(run.config, run.plan, run.directory.root, run.resumed_path)
    flags, num_learners = shared.flags, shared.num_learners
    flags["closed"].fill_(1)  # no other machine is waited for at the end
    replace, recorder = Replacements(shared, run.progress_state()), UpdateRecorder(run)
    num_processes = num_learners + len(shared.shards)
    limit = limit_of(run.config)
    with WorkerPool(work, num_processes, (shared, replace.progress, 0), run.plan.cores, replace, limit) as pool:
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
                recorder.episodes.extend(content)
            elif kind == "bad numbers":
                run.note_bad(content, is_whole_update=True)
            elif kind == "record":
                table = flags["times"]
                recorder.record(content, table[:num_learners], table[num_learners:], replace.count)
            elif kind == "save":
                run.save(checkpoint.unpack(content))
            elif kind == "final state":
                run.finish(checkpoint.unpack(content))


def work(rank: int, connection: Connection, shared: Shared, progress: dict[str, Any], restarts: int) -> None:
    """In a worker."""
    process.prepare_process(shared.plan.num_threads)
    clock = PhaseClock()
    keeper = process_times.TimeKeeper(shared.flags["times"][rank], clock)
    try:
        if rank < shared.num_learners:
            _learn(rank, connection, shared, progress, keeper)
        else:
            _act(rank - shared.num_learners, connection, shared, progress, restarts, keeper)
    except LostContactError as error:
        connection.send(("message", ("lost contact", str(error))))
    keeper.write()


def _start(connection: Connection, shared: Shared, keeper: process_times.TimeKeeper) -> None:
    """Time counts from when all are ready."""
    connection.send(("message", ("started", None)))
    go, board = shared.flags["go"].numpy(), shared.board()
    wait_until(lambda: bool(go[0]) or board.stopped, keeper.clock)
    keeper.start()


def _act(
    actor: int, connection: Connection, shared: Shared, progress: dict[str, Any], restarts: int,
    keeper: process_times.TimeKeeper,
) -> None:  # fmt: skip
    """Unroll after unroll with the newest weights, as long as there is a page to put them."""
    config, plan, store, board, clock = shared.config, shared.plan, shared.store(), shared.board(), keeper.clock
    pooling.available()  # checked before time counts
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
        index += 1
        is_bad, *counts = bad_numbers.count(rollout)
        if is_bad:  # the page stays free: nobody sees it
            shared.flags["left_out"][actor, 0] += rollout.num_steps
            bad = bad_numbers.left_out(counts, config.training.on_nan)
            connection.send(("message", ("bad numbers", bad)))
        else:
            store.publish(actor, page, version=version, return_moments=returns.moments(rollout))
        keeper.write()
        if rollout.episodes:
            connection.send(("message", ("episodes", rollout.episodes)))


def _learn(
    rank: int, connection: Connection, shared: Shared, progress: dict[str, Any], keeper: process_times.TimeKeeper
) -> None:
    """Step after step on the unrolls that the leader, the first learner, hands out."""
    config, plan, task, clock, flags = shared.config, shared.plan, shared.task, keeper.clock, shared.flags
    reduce, others = _join(rank, shared, clock)
    state = checkpoint.load(shared.resumed_path) if shared.resumed_path else None
    model, algorithm = build_algorithm(
        config, plan, task.observation_shape, task.num_actions, env_ids=(), reduce=reduce, checkpoint=state
    )
    assert isinstance(algorithm, Impala)
    store, board, corrections = shared.store(), shared.board(), Corrections(flags)
    lessons = UnrollLearner(config, algorithm, board, shared.claims, store)
    if config.impala.replay_fraction > 0:
        share = -(-config.impala.replay_size // shared.num_learners)
        layout = unroll_layout(task, config.training.n_steps)
        number = rank + (shared.seat.first_learner if shared.seat else 0)
        random = stream(config.env.seed, "replay", number, progress["updates"])
        lessons.replay_from(ReplayFile(shared.folder, share, layout), random)
    leader = None
    if rank == 0:
        weights = PublishedWeights(shared.weights)
        weights.publish(algorithm.learner.flat)
        leader = LeadingLearner(
            config, flags, board, shared.claims, store, weights, algorithm, connection, keeper, progress, others,
            shared.steps_per_update,
        )  # fmt: skip
    _start(connection, shared, keeper)
    step = 0
    while True:
        step += 1
        if leader is not None:
            leader.hand_out(clock)
        if not board.wait(step, clock):
            break
        correction = board.correction  # when the gradients have met, the next step may have been announced
        with clock.phase("update"):
            losses = lessons.learn(clock)
        corrections.add_to(algorithm.learner, correction)
        keeper.write()
        if leader is not None and leader.step_done(losses):
            leader.record()
            if shared.saves and leader.checkpoint_due():
                leader.save(state_of(model, algorithm, task.observation_shape, task.num_actions))
    if leader is not None:
        leader.record()
        leader.wait_for_others()
        if shared.saves:
            leader.save(state_of(model, algorithm, task.observation_shape, task.num_actions), kind="final state")


def _join(rank: int, shared: Shared, clock: PhaseClock) -> tuple[Reducer, OtherMachines]:
    """(the sum over the learners that take a step together, what the leader knows of other machines)."""
    seat, flags = shared.seat, shared.flags
    if seat is None:
        return SharedMemoryReducer(shared.sums, rank, clock), OtherMachines(flags)
    if shared.is_on_its_own:
        return SharedMemoryReducer(shared.sums, rank, clock), IndependentMachines(flags)
    leaders, beyond = join_machines(seat, rank)
    others = MachinesInStep(flags, leaders.sum, is_head=seat.node_rank == 0) if leaders else OtherMachines(flags)
    return SharedMemoryReducer(shared.sums, rank, clock, beyond), others
