"""The lock-free protocols of execution/, each in a case small enough to be gone through: real code on a machine of its
own.

A protocol is a function that makes the processes of a case and what judges its end; `Case` says the rest.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from machine import Machine, Memory, Pipes, Private, begin_loop, loop_again, note, on_this_machine, wait_until

from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution import reduce
from rl_cluster_benchmark.execution.actor_learner import actor_learner, leading_learner, unrolls
from rl_cluster_benchmark.execution.hogwild import hogwild_worker
from rl_cluster_benchmark.execution.in_step import helping
from rl_cluster_benchmark.execution.machines import other_machines
from rl_cluster_benchmark.processes import claims, published_weights, watchdog

MODULES = (claims, helping, hogwild_worker, leading_learner, reduce, unrolls, published_weights)


@dataclass
class Case:
    """What a machine is made of."""

    memory: Memory
    processes: dict[str, Callable[[], None]]
    pipes: Pipes | None = None
    mortal: dict[str, Callable[[], None] | None] = field(default_factory=dict)
    judge: Callable[[dict[str, list[Any]], dict[str, Any]], None] = lambda notes, memory: None


def check(make: Callable[[], Case], *, model: str = "sc", deaths: int = 0) -> int:
    """Go through everything; returns the number of states."""
    with on_this_machine(*MODULES), stand_ins():
        case = make()
        return Machine(
            case.memory,
            case.processes,
            model=model,
            pipes=case.pipes,
            mortal=case.mortal,
            deaths=deaths,
            judge=case.judge,
        ).run()


@contextmanager
def stand_ins() -> Iterator[None]:
    """For the few functions of torch that the protocols call on shared memory."""

    def add_up(parts: Any, dim: int, out: Any) -> None:
        out.store(parts.load().sum(dim))

    def cat(parts: Any) -> Any:
        return [value for part in parts for value in (part.load() if hasattr(part, "load") else part)]

    kept = reduce.torch, helping.torch
    reduce.torch = SimpleNamespace(float32="words", sum=add_up)
    helping.torch = SimpleNamespace(cat=cat)
    try:
        yield
    finally:
        reduce.torch, helping.torch = kept


@contextmanager
def planted(owner: type, name: str, *changes: tuple[str, str]) -> Iterator[None]:
    """A method, or a property, with some of its lines replaced: before, after."""
    original = owner.__dict__[name]
    is_property = isinstance(original, property)
    function = original.fget if is_property else original
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in changes:
        assert before in source, f"{owner.__name__}.{name} has changed; plant the bug anew"
        source = source.replace(before, after, 1)
    scope: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, function.__globals__, scope)
    setattr(owner, name, scope[name])
    try:
        yield
    finally:
        setattr(owner, name, original)


# Weights that one publishes and others read


class Published(published_weights.PublishedWeights):
    """Its reader's loop, which begins with a look at the version, is one that the machine knows."""

    _loop: int | None = None

    @property
    def version(self) -> int:
        if self._loop is not None:
            loop_again(self._loop)
        if self._is_reading:
            self._loop = begin_loop()
        return super().version

    _is_reading = False

    def read(self, into: Any) -> int:
        self._is_reading, self._loop = True, None
        version = super().read(into)
        self._is_reading, self._loop = False, None
        return version


def published_weights(readers: int = 1, versions: int = 4, reads: int = 2) -> Case:
    """Every reader gets whole versions, and never an older one than before."""
    memory = Memory(weights=(2, 2), stamps=(2, 1), latest=(1,))

    def publisher() -> None:
        mine = Published(memory)
        for version in range(1, versions + 1):
            assert mine.publish(Private([version, version])) == version

    def reader() -> None:
        mine, into, last = Published(memory), Private([0, 0]), 0
        wait_until(lambda: mine.version > 0)
        for _ in range(reads):
            version = mine.read(into)
            assert into.values == [version, version], f"version {version} was read as {into.values}"
            assert version >= last, "versions never go back"
            last = version

    return Case(memory, {"publisher": publisher, **{f"reader {i}": reader for i in range(readers)}})


def published_weights_and_death() -> Case:
    """A publisher that dies anywhere: its reader still gets a whole version."""
    case = published_weights(versions=3, reads=1)
    case.mortal = {"publisher": lambda: None}
    reader = case.processes["reader 0"]

    def patient() -> None:
        """What waits for the first version is ended by the parent."""
        if Published(case.memory).version:
            reader()

    case.processes["reader 0"] = patient
    return case


# Unrolls


def unroll_store(actors: int = 1, pages: int = 2, makes: int = 3, learns: int = 3, mortal: bool = False) -> Case:
    """Each unroll is learned from once, whole, in the order it was made; two environments to a page."""
    envs = 2
    shape = (actors * pages, envs)
    memory = Memory(
        observations=shape, actions=shape, return_moments=(*shape, 1), written=(shape[0], 1), consumed=shape,
        version=shape[:1], finished=shape[:1], stop=(1,),
    )  # fmt: skip
    for name in unrolls.STEP_FIELDS:  # those that are not looked at here lie where the actions do
        memory._arrays.setdefault(name, memory["actions"])
    shards = [list(range(envs))] * actors

    def actor(number: int, first: int) -> Callable[[], None]:
        def act() -> None:
            store = unrolls.UnrollStore(memory, shards)
            for serial in range(first, first + makes):
                page: int | None = None

                def found() -> bool:
                    nonlocal page
                    page = store.free_page(number)
                    return page is not None or bool(memory["stop"][0])

                wait_until(found)
                if page is None:
                    return
                for env in range(envs):
                    memory["observations"][page, env] = 10 * serial + env
                    memory["actions"][page, env] = 10 * serial + env
                store.publish(number, page, version=serial, return_moments=[[serial]] * envs)

        return act

    def learner() -> None:
        store, learned = unrolls.UnrollStore(memory, shards), 0
        while learned < learns:
            rows = np.empty(0)

            def ready() -> bool:
                nonlocal rows
                rows = store.full()
                return len(rows) > 0

            wait_until(ready)
            rows = rows[: min(2 if learned else 1, learns - learned)]  # a part of a page, then maybe of two
            for row in rows:
                seen = [store["observations"][row], store["actions"][row]]
                (serial,) = store.versions(np.array([row])).tolist()
                moments = store["return_moments"][row, 0]
                assert seen == [10 * serial + row % envs] * 2, f"unroll {serial} was read as {seen}"
                assert moments == serial, f"unroll {serial} has the moments of {moments}"
                again = store["actions"][row]
                assert again == seen[1], "written while it was read"
                note("learned", seen[0])
            store.release(rows)
            learned += len(rows)
        memory["stop"][0] = 1

    def judge(notes: dict[str, list[Any]], _: dict[str, Any]) -> None:
        learned = notes["learned"]
        assert len(learned) == learns, "none is lost"
        assert len(set(learned)) == learns, f"twice: {learned}"

    processes = {f"actor {i}": actor(i, 1 + 100 * i) for i in range(actors)}
    replacement = {"actor 0": actor(0, 50)} if mortal else {}
    return Case(memory, {**processes, "learner": learner}, mortal=replacement, judge=judge)


# A step of IMPALA's learners: the board, the claims, the reduction at the end


def claims_on(pipes: Pipes) -> claims.Claims:
    kept, claims.os = claims.os, pipes  # type: ignore[assignment]
    try:
        return claims.Claims()
    finally:
        claims.os = kept


@contextmanager
def with_pipes(pipes: Pipes) -> Iterator[None]:
    kept, claims.os = claims.os, pipes  # type: ignore[assignment]
    try:
        yield
    finally:
        claims.os = kept


def learners_steps(learners: int = 2, steps: int = 2, groups: int = 2) -> Case:
    """In every step each group of unrolls is learned from once, by its rows and the step's rate."""
    pipes = Pipes()
    shared = claims_on(pipes)
    memory = Memory(
        step=(1,), stop=(1,), rows=(groups,), rate=(1,), reward_divisor=(1,), correction=(1,), arrivals=(learners, 1)
    )

    def process(rank: int) -> Callable[[], None]:
        def learn() -> None:
            board = leading_learner.StepBoard(memory, learners, 1)
            board.group_size, board.num_groups = 1, groups
            reducer = reduce.SharedMemoryReducer(memory, rank, PhaseClock())
            for step in range(1, steps + 1):
                with with_pipes(pipes):
                    if rank == 0:
                        hand_out(board, step)
                    assert board.wait(step, None)
                    while (number := shared.take()) is not None:
                        note(f"groups of {rank}", (step, number, board.group(number)[0], board.rate))
                reducer.meet()
            if rank == 0:
                board.stop()
            assert not board.wait(steps + 1, None)

        return learn

    def hand_out(board: leading_learner.StepBoard, step: int) -> None:
        """As LeadingLearner.hand_out does."""
        mine = object.__new__(leading_learner.LeadingLearner)  # with what hand_out looks at, and no processes
        vars(mine).update(
            board=board, claims=shared, store=SimpleNamespace(full=lambda: np.arange(groups) + 10 * step),
            _replayed=lambda: 0, _should_stop=lambda: False, _left_out_since=lambda: 0, _left_out_seen=0,
            others=SimpleNamespace(agree=lambda news: news, correction=lambda: 0), _count=step - 1,
            _news=lambda *_: SimpleNamespace(stop=False, rate=float(step)), _note=lambda *_: None,
            algorithm=SimpleNamespace(normalize_rewards=SimpleNamespace(scale=SimpleNamespace(divisor=1.0))),
            config=SimpleNamespace(impala=SimpleNamespace(passes=1)), _passes_left=0,
        )  # fmt: skip
        mine.hand_out(PhaseClock())

    def judge(notes: dict[str, list[Any]], _: dict[str, Any]) -> None:
        found = sorted(one for of_rank in notes.values() for one in of_rank)
        expected = [(step, i, 10 * step + i, float(step)) for step in range(1, steps + 1) for i in range(groups)]
        assert found == expected, found

    processes = {"leader" if rank == 0 else f"learner {rank}": process(rank) for rank in range(learners)}
    return Case(memory, processes, pipes, judge=judge, mortal={"learner 1": None})


# Claims


def claimed_numbers(workers: int = 3, numbers: int = 3, taking: str = "pipe") -> Case:
    """Each number goes to one. With `taking` "counter" there is a shared counter instead, a bug that is to be found."""
    pipes = Pipes()
    shared = claims_on(pipes)
    memory = Memory(counter=(1,))

    def take() -> int | None:
        if taking == "pipe":
            return shared.take()
        number = memory["counter"][0]
        if number == numbers:
            return None
        memory["counter"][0] = number + 1
        return int(number)

    def worker(rank: int) -> Callable[[], None]:
        def work() -> None:
            with with_pipes(pipes):
                if rank == 0 and taking == "pipe":
                    shared.offer(range(numbers))
                while (number := take()) is not None:
                    note(f"taken by {rank}", number)

        return work

    def judge(notes: dict[str, list[Any]], _: dict[str, Any]) -> None:
        taken = sorted(number for of_rank in notes.values() for number in of_rank)
        assert taken == list(range(numbers)), taken

    return Case(
        memory, {f"worker {i}": worker(i) for i in range(workers)}, pipes, judge=judge, mortal={"worker 1": None}
    )


# Reductions


def reductions(workers: int = 2, sums: int = 2, size: int = 2) -> Case:
    """Sums follow each other, and a shared change; all get the same, and nobody writes what another still reads."""
    memory = Memory(
        arrivals=(workers, 1), vectors=(workers, size), vector_sum=(size,), small=(workers, 1), small_sum=(1,)
    )

    def worker(rank: int) -> Callable[[], None]:
        def work() -> None:
            reducer = reduce.SharedMemoryReducer(memory, rank, PhaseClock())
            for number in range(1, sums + 1):
                found = reducer.sum(Private([(rank + 1) * number] * size)).load().tolist()
                expected = [number * workers * (workers + 1) // 2] * size
                assert found == expected, f"sum {number} is {found} instead of {expected}"
            changed = Private([7] * size)
            reducer.share(changed, lambda result: result.store(result.load() + 1))
            assert changed.values == [8] * size, changed.values

        return work

    return Case(memory, {f"worker {i}": worker(i) for i in range(workers)}, mortal={"worker 1": None})


# Help with rollouts


def help_with_rollouts(
    workers: int = 2, rollouts: int = 1, steps: int = 2, images: int = 2, fast: bool = False, page: int = 512
) -> Case:
    """Features are those of this step's observations, whoever computed them; afterwards every post is free."""
    pipes, counts = Pipes(page), [images] * workers
    shards = [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(workers)]
    memory = Memory(
        workers=(workers, 2), posts=(workers, 3), features=(sum(counts),), observations=(steps, sum(counts)),
        arrivals=(workers, 1),
    )  # fmt: skip
    free = claims_on(pipes)
    with with_pipes(pipes):
        free.offer(range(workers))
    model = SimpleNamespace(features=lambda observations: (2 * observations.load()).tolist())

    def worker(rank: int) -> Callable[[], None]:
        def work() -> None:
            shared: Any = SimpleNamespace(memory=memory, free=free)
            clock, own = PhaseClock(), shards[rank]
            with with_pipes(pipes):
                mine = helping.Helping(shared, rank, shards, memory["observations"], model, clock)  # type: ignore[arg-type]
                reducer = reduce.SharedMemoryReducer(memory, rank, clock)
                for index in range(rollouts):
                    for t in range(0 if fast and rank else steps):
                        seen = [100 * (index + 1) + 10 * t + n for n in range(own.start, own.stop)]
                        memory["observations"][t, own] = seen
                        found = [int(value) for value in mine.features(t)]
                        assert found == [2 * image for image in seen], f"rollout {index} step {t}: {found} of {seen}"
                    mine.finish(index)
                    reducer.meet()  # as every update does
                if rank == 0:
                    note("free", tuple(sorted(iter(free.take, None))))

        return work

    def judge(notes: dict[str, list[Any]], at_end: dict[str, Any]) -> None:
        assert notes["free"] == [tuple(range(workers))], f"posts that are free: {notes['free']}"
        taken = [at_end[f"posts[{3 * i + helping.TAKEN}]"] for i in range(workers)]
        assert not any(taken), "a post is not given back"

    return Case(
        memory, {f"worker {i}": worker(i) for i in range(workers)}, pipes, judge=judge, mortal={"worker 1": None}
    )


# Counters of A3C


def sums_since_last_time(workers: int = 2, times: int = 2) -> Case:
    """Everything is counted once by each, and the counters of updates lose none."""
    memory = Memory(table=(workers, 1), elsewhere=(1,), counters=(workers, 3), closed=(1,))

    def worker(rank: int) -> Callable[[], None]:
        def work() -> None:
            news = hogwild_worker.SumSinceLastTime(memory["table"], rank, memory["elsewhere"])  # type: ignore[arg-type]
            course: Any = SimpleNamespace(
                rank=rank, shared=memory, connection=SimpleNamespace(send=lambda _: None),
                time=SimpleNamespace(write=lambda: None), updates=0, version=0, _elapsed=0.0,
            )  # fmt: skip
            course.count = lambda column: hogwild_worker.HogwildCourse.count(course, column)
            total = 0
            for _ in range(times):
                total += int(news(Private([10**rank]))[0])
                hogwild_worker.HogwildCourse.record(course, 1, (), {})
            memory["counters"][rank, hogwild_worker.DONE] = 1
            wait_until(lambda: course.count(hogwild_worker.DONE) == workers)
            total += int(news(Private([0]))[0])
            assert total == times * sum(10**i for i in range(workers)), f"{total}: counted twice, or not at all"
            updates = course.count(hogwild_worker.UPDATES)
            assert updates == workers * times, f"{updates} updates"

        return work

    return Case(memory, {f"worker {i}": worker(i) for i in range(workers)}, mortal={"worker 1": None})


# Corrections between machines


def corrections(number: int = 2, steps: int = 3, learners: int = 2) -> Case:
    """Every learner adds each correction once, whole and at the same step, while the node process writes the next."""
    memory = Memory(
        parameters_correction=(2,),
        written=(1,),
        taken=(1,),
        announced=(1,),
        step=(1,),
        over=(1,),
        arrivals=(learners, 1),
    )

    def node() -> None:
        flags = actor_learner.PublishedParameters.__new__(actor_learner.PublishedParameters)
        flags._flags = memory  # type: ignore[assignment]
        for i in range(1, number + 1):
            wait_until(lambda: not flags.busy or memory["over"][0])
            if memory["over"][0]:
                return
            flags.add(Private([i, i]))  # type: ignore[arg-type]

    def learner(rank: int) -> Callable[[], None]:
        def learn() -> None:
            reducer = reduce.SharedMemoryReducer(memory, rank, PhaseClock())
            mine: Any = SimpleNamespace(flat=Private([0, 0]), model=SimpleNamespace(weights_changed=lambda: None))
            adding = other_machines.Corrections(memory)  # type: ignore[arg-type]
            own = other_machines.IndependentMachines.__new__(other_machines.IndependentMachines)
            own.flags, own._announced, own._added = memory, 0, 0  # type: ignore[assignment]
            for step in range(1, steps + 1):
                if rank == 0:
                    memory["announced"][0], memory["step"][0] = own.correction(), step  # on the board
                wait_until(lambda step=step: memory["step"][0] >= step)
                reducer.meet()  # in the sum of their gradients
                due = memory["announced"][0]
                before = mine.flat.values
                if adding.add_to(mine, due):
                    added = [new - old for new, old in zip(mine.flat.values, before, strict=True)]
                    assert added == [due, due], f"correction {due} was read as {added}"
                    note(f"added by {rank}", due)
                if rank == 0:
                    own.step_done()
            memory["over"][0] = 1

        return learn

    def judge(notes: dict[str, list[Any]], _: dict[str, Any]) -> None:
        added = [notes.get(f"added by {rank}", []) for rank in range(learners)]
        assert all(one == added[0] for one in added), f"not all have added the same: {added}"
        assert added[0] == list(range(1, len(added[0]) + 1)), f"each once: {added[0]}"

    return Case(memory, {"node": node, **{f"learner {i}": learner(i) for i in range(learners)}}, judge=judge)


# A worker's pulse


def pulses(beats: int = 3) -> Case:
    """Whoever watches sees the number grow, never shrink."""
    memory = Memory(numbers=(2,))

    def worker() -> None:
        pulse = watchdog.Pulse.__new__(watchdog.Pulse)
        pulse._numbers = memory["numbers"]  # type: ignore[assignment]
        for i in range(beats):
            pulse._beat(is_waiting=bool(i % 2))

    def watcher() -> None:
        pulse, seen = watchdog.Pulse.__new__(watchdog.Pulse), 0
        pulse._numbers = memory["numbers"]  # type: ignore[assignment]
        for _ in range(2):
            now = pulse.beats
            assert now >= seen
            assert pulse.is_waiting in (False, True)
            seen = now

    def judge(_: dict[str, list[Any]], at_end: dict[str, Any]) -> None:
        assert at_end["numbers[0]"] == beats, "none is lost"

    return Case(memory, {"worker": worker, "watcher": watcher}, judge=judge, mortal={"worker": None})
