"""Every order in which the processes of small cases can run, with deaths anywhere; and that planted bugs are found."""

from __future__ import annotations

import re
from functools import partial

import protocols
import pytest
from machine import Machine, Memory, MistakeError, wait_until
from protocols import check, planted

from rl_cluster_benchmark.execution.actor_learner.actor_learner import PublishedParameters
from rl_cluster_benchmark.execution.actor_learner.leading_learner import StepBoard
from rl_cluster_benchmark.execution.actor_learner.unrolls import UnrollStore
from rl_cluster_benchmark.execution.hogwild.hogwild_worker import HogwildCourse, SumSinceLastTime
from rl_cluster_benchmark.execution.in_step.helping import Helping
from rl_cluster_benchmark.execution.machines.other_machines import IndependentMachines
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.processes.published_weights import PublishedWeights

CASES = {
    "weights": protocols.published_weights,
    "weights, a dead publisher": protocols.published_weights_and_death,
    "unrolls": partial(protocols.unroll_store, learns=6),
    "unrolls of two actors": partial(protocols.unroll_store, actors=2, pages=1, makes=1, learns=4),
    "learners' steps": protocols.learners_steps,
    "claims": protocols.claimed_numbers,
    "reductions": protocols.reductions,
    "help": protocols.help_with_rollouts,
    "help for one": partial(protocols.help_with_rollouts, steps=3, fast=True),
    "help, and posts that fill a page": partial(protocols.help_with_rollouts, fast=True, page=2),
    "sums of A3C": partial(protocols.sums_since_last_time, times=1),
    "corrections": protocols.corrections,
    "pulses": protocols.pulses,
}
LARGE = {
    "weights, two readers": partial(protocols.published_weights, readers=2, versions=5, reads=1),
    "unrolls, a dead actor": partial(protocols.unroll_store, learns=4, mortal=True),
    "learners' steps": partial(protocols.learners_steps, learners=3),
    "claims": partial(protocols.claimed_numbers, workers=4, numbers=5),
    "help in two rollouts": partial(protocols.help_with_rollouts, rollouts=2, fast=True),
    "sums of A3C": protocols.sums_since_last_time,
    "corrections": partial(protocols.corrections, number=3, steps=4),
}
WITH_A_DEATH = (
    "weights, a dead publisher",
    "learners' steps",
    "claims",
    "reductions",
    "help for one",
    "sums of A3C",
    "pulses",
)


@pytest.mark.parametrize("model", ["sc", "tso"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_goes_wrong_in_any_order(name, model):
    assert check(CASES[name], model=model) > 100


@pytest.mark.parametrize("model", ["sc", "tso"])
@pytest.mark.parametrize("name", WITH_A_DEATH)
def test_nothing_goes_wrong_if_somebody_dies(name, model):
    """The others see nothing wrong until they are ended, too."""
    assert check(CASES[name], model=model, deaths=1) > 100


def test_an_actor_that_dies_anywhere_is_replaced():
    """In small; the large one is below."""
    case = partial(protocols.unroll_store, pages=1, makes=1, learns=2, mortal=True)
    assert check(case, model="tso", deaths=1) > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "model"),
    # two rollouts with store buffers have more than a million states
    [(name, model) for name in LARGE for model in ("sc", "tso") if (name, model) != ("help in two rollouts", "tso")],
)
def test_nothing_goes_wrong_in_larger_cases(name, model):
    assert check(LARGE[name], model=model, deaths=int(name.endswith("actor"))) > 100


@pytest.mark.parametrize(
    "case",
    [
        protocols.published_weights,
        partial(protocols.unroll_store, pages=1, makes=1, learns=2),
        partial(protocols.learners_steps, steps=1, groups=1),
        partial(protocols.reductions, sums=1, size=1),
        partial(protocols.help_with_rollouts, steps=2, fast=True),
        protocols.corrections,
        partial(protocols.sums_since_last_time, times=1),
    ],
    ids=["weights", "unrolls", "learners' steps", "reductions", "help", "corrections", "sums of A3C"],
)
def test_these_rely_on_the_order_of_stores_that_x86_keeps(case):
    """On a machine that reorders stores they fail: the doctor says that parallel modes want x86."""
    with pytest.raises(MistakeError):
        check(case, model="pso")


@pytest.mark.parametrize("name", ["claims", "pulses"])
def test_these_do_not(name):
    assert check(CASES[name], model="pso") > 100


PUBLISHED = '    self._memory["version"][page] = version\n'
COUNTED = "    self._written[page] += 1  # last: from here on it may be read\n"
BUGS = {
    "weights: not said to be in the making": (
        "weights", PublishedWeights, "publish", ("    self._stamps[place] = WRITING\n", "")
    ),
    "weights: the version before the weights": (
        "weights", PublishedWeights, "publish",
        ("    self._copies[place].copy_(weights)\n", ""),
        ("    self._latest[0] = version\n", "    self._latest[0] = version\n    self._copies[place].copy_(weights)\n"),
    ),
    "weights: the stamp not looked at again": (
        "weights", PublishedWeights, "read",
        ("            if self._stamps[place] == version:\n                return", "            return"),
    ),
    "unrolls: counted before they are whole": (
        "unrolls", UnrollStore, "publish", (COUNTED, ""), (PUBLISHED, COUNTED + PUBLISHED)
    ),
    "unrolls: a page given back with its first unroll": ("unrolls", UnrollStore, "free_page", (").all():", ").any():")),
    "unrolls: released with their neighbours": (
        "unrolls", UnrollStore, "release",
        ("self._consumed[pages, envs] = self._written[pages]", "self._consumed[pages] = self._written[pages][:, None]"),
    ),
    "learners: the step announced before its rows": (
        "learners' steps", StepBoard, "announce",
        ("    self._rows[:]", "    self._step[0] = step\n    self._rows[:]"),
    ),
    "reductions: nobody waits for the parts": ("reductions", SharedMemoryReducer, "meet", (".min() >=", ".max() >=")),
    "reductions: nobody waits before a change": (
        "reductions", SharedMemoryReducer, "share", ("self.meet()  # nobody reads the last sum any more", "pass")
    ),
    "help: answered before the features are there": (
        "help for one", Helping, "_help",
        ("        with self._clock", "        post[ANSWERED] += 1\n        with self._clock"),
        ("        post[ANSWERED] += 1\n    post[TAKEN]", "    post[TAKEN]"),
    ),
    "help: asked before the step is said": (
        "help for one", Helping, "features",
        ("    self._workers[self._rank, STEP] = t\n", ""),
        ("    first = self", "    self._workers[self._rank, STEP] = t\n    first = self"),
    ),
    "help: a post kept": ("help for one", Helping, "_help", ("    post[TAKEN] = 0\n", "")),
    "help: left while it is asked": (
        "help for one", Helping, "_help", ("post[ASKED] > post[ANSWERED] or", "post[ASKED] > post[ANSWERED] + 1 or")
    ),
    "A3C: the sum looked at twice": (
        "sums of A3C", SumSinceLastTime, "__call__",
        ("    self._seen = others", "    again = self._table[:, :size].clone()\n    again[self._rank] = 0.0\n"
                                    "    self._seen = again.sum(0)"),
    ),
    "A3C: one counter for all": (
        "sums of A3C", HogwildCourse, "record", ('["counters"][self.rank]', '["counters"][0]')
    ),
    "corrections: counted before they are there": (
        "corrections", PublishedParameters, "add",
        ('    self._flags["parameters', '    self._flags["written"][0] += 1\n    self._flags["parameters'),
        ('.copy_(correction)\n    self._flags["written"][0] += 1', ".copy_(correction)"),
    ),
    "corrections: the last one not waited for": (
        "corrections", PublishedParameters, "busy", ('self._flags["written"][0] != self._flags["taken"][0]', "False")
    ),
    "corrections: taken as soon as announced": (
        "corrections", IndependentMachines, "step_done",
        ('["taken"][0] = self._added', '["taken"][0] = self._announced')
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_with_the_way_to_it(bug):
    name, owner, method, *changes = BUGS[bug]
    with planted(owner, method, *changes), pytest.raises(MistakeError) as found:
        check(CASES[name])
    print(found.value)
    assert re.search(r", after:\n  \w", str(found.value)), "the interleaving is told"


def test_claims_that_are_not_taken_at_once_are_found():
    """Read a shared counter, then write it: two get the same number."""
    with pytest.raises(MistakeError, match="at the end"):
        check(partial(protocols.claimed_numbers, taking="counter"))


# The machine itself


def two(first, second, **settings):
    memory = Memory(x=(1,), y=(1,))
    seen = {}

    def judge(notes, _):
        seen.setdefault("ends", set()).add(tuple(sorted((key, *values) for key, values in notes.items())))

    x, y = memory["x"], memory["y"]
    Machine(memory, {"a": lambda: first(x, y), "b": lambda: second(x, y)}, judge=judge, **settings).run()
    return seen["ends"]


@pytest.mark.parametrize(("model", "both_zero"), [("sc", False), ("tso", True), ("pso", True)])
def test_store_buffers_are_those_of_x86(model, both_zero):
    """Each stores and then loads what the other has stored: on x86 both may see nothing."""

    def process(mine, theirs, name):
        mine[0] = 1
        protocols.note(name, theirs[0])

    ends = two(lambda x, y: process(x, y, "a"), lambda x, y: process(y, x, "b"), model=model)
    assert ((("a", 0), ("b", 0)) in ends) == both_zero
    assert (("a", 1), ("b", 1)) in ends


@pytest.mark.parametrize(("model", "is_reordered"), [("sc", False), ("tso", False), ("pso", True)])
def test_stores_are_reordered_only_where_that_is_said(model, is_reordered):
    def write(x, y):
        x[0] = 1
        y[0] = 1

    def read(x, y):
        seen = y[0]
        protocols.note("seen", (seen, x[0]))

    assert ((("seen", (1, 0)),) in two(write, read, model=model)) == is_reordered


def test_waiting_for_ever_is_found():
    with pytest.raises(MistakeError, match="waits for ever"):
        two(lambda x, y: wait_until(lambda: x[0] == 2), lambda x, y: x.store([1]))
