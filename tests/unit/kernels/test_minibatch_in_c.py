"""A minibatch in one call of C: the same as pass by pass."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.commands import needs_native
from helpers.images import images
from helpers.pass_by_pass import PassByPass

from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.config.schema import Config, HardwareConfig, ModelConfig
from rl_cluster_benchmark.execution import hidden_gradient
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.execution.in_step.work_sharing import WorkSharing
from rl_cluster_benchmark.kernels import build, minibatch_pass, native_network
from rl_cluster_benchmark.learning.batch import Batch
from rl_cluster_benchmark.learning.learner import OPTIMIZERS, Adam, Alone
from rl_cluster_benchmark.learning.minibatch import Moments, PassesInC
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.processes.claims import Claims

SAMPLES, PIECES = 120, 6
MOMENTS = Moments(100.0, 0.1, 1.3)
pytestmark = needs_native
both = pytest.mark.parametrize("architecture", ["impala", "nature"])


class SharedWithNobody:
    """One worker that leaves rows of the hidden layer, and takes every piece."""

    rank, owners, env_ids, fraction = 0, [0], [0], 0.5

    def __init__(self, trunk):
        hidden_shape = tuple(trunk.hidden_weights.shape)
        self.hidden = HiddenGradient(hidden_gradient.allocate(hidden_shape, SAMPLES, trunk.precision), 0, 1)
        self.pieces = Claims()
        self.pipe = self.pieces.reading

    def parameters(self, size):
        return torch.zeros(size)

    def moments(self, size):
        return {name: torch.zeros(size) for name in Adam.MOMENTS}

    def part(self, size):
        return slice(0, size)

    def vectors(self, size):
        return list(torch.full((PIECES, size), 7.0))  # to be cleared

    def take(self):
        return iter(self.pieces.take, None)


def make(architecture, precision=torch.float32, *, shared=False):
    torch.manual_seed(0)
    config = ModelConfig(architecture=architecture)
    model = make_model(config, (64, 64, 3), 15, HardwareConfig(), precision, "native")
    torch.nn.init.normal_(model.policy_head.weight, std=0.2)
    sharing = SharedWithNobody(model.native_trunk) if shared else None
    return PPO(Config(), model, env_ids=[0], micro_batch=32, reduce=Alone(), sharing=sharing)


def gradient(way, ppo, batch, micro_batch=32):
    learner, objective = ppo.on_policy.learner, ppo.objective
    if way is PassByPass:
        return PassByPass(learner, ppo.hyper, micro_batch, batch, MOMENTS, objective)
    return PassesInC(learner, ppo.hyper, batch, MOMENTS, objective.in_c, learner.model.native_trunk)


def experience():
    generator = torch.Generator().manual_seed(1)
    log_probs, values, advantages, returns = torch.randn(4, SAMPLES, generator=generator)
    valid = (torch.rand(SAMPLES, generator=generator) > 0.1).float()
    return Batch(
        images(SAMPLES), valid, torch.randint(15, (SAMPLES,), generator=generator),
        log_probs - 2.7, values, advantages, returns,
    )  # fmt: skip


def some_rows(count):
    return np.random.default_rng(2).permutation(SAMPLES)[:count]


def is_same(ours, theirs, precision):
    """Return whether these are equal; in bfloat16 how many samples a pass has changes the order of sums."""
    is_close = precision == torch.bfloat16 and (ours - theirs).norm() < 1e-6 * theirs.norm()
    return is_close or torch.equal(ours, theirs)


@both
@pytest.mark.parametrize(("count", "micro_batch"), [(0, 32), (1, 32), (17, 32), (70, 32), (99, 100)])
def test_is_the_same_as_pass_by_pass(architecture, precision, count, micro_batch):
    ppo = make(architecture, precision)
    learner, found = ppo.on_policy.learner, []
    for way in (PassByPass, PassesInC):
        learner.grad.fill_(7.0)  # to be cleared
        gradient(way, ppo, experience(), micro_batch).write(some_rows(count), 0)
        found.append(torch.cat([learner.grad, learner.stats]))
    assert found[0].any() == (count > 0)
    assert is_same(*found, precision) if count > micro_batch else torch.equal(*found)
    assert isinstance(ppo.on_policy.gradients.passes(experience(), MOMENTS, ppo.objective), PassesInC), (
        "the way that is taken"
    )


def test_many_samples_are_several_calls(precision, monkeypatch):
    ppo, found = make("nature", precision), []
    for most in (1024, 32):
        monkeypatch.setattr(minibatch_pass, "MOST_IN_A_CALL", most)
        gradient(PassesInC, ppo, experience()).write(some_rows(110), 0)
        found.append(ppo.on_policy.learner.grad.clone())
    assert is_same(*found, precision)


@both
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_change_no_bit(architecture, threads):
    ppo, found = make(architecture), []
    for number in (1, threads):
        torch.set_num_threads(number)
        try:
            learner = ppo.on_policy.learner
            gradient(PassesInC, ppo, experience()).write(some_rows(110), 0)
            found.append(torch.cat([learner.grad, learner.stats]))
        finally:
            torch.set_num_threads(1)
    assert found[0].any()
    assert torch.equal(*found)


@both
def test_pieces_of_shared_work_are_the_same(architecture, precision):
    bounds, own = (0, 40, 50, 51, 53, 60, 80), some_rows(SAMPLES)[80:]
    found = []
    for way in (PassByPass, PassesInC):
        ppo = make(architecture, precision, shared=True)
        learner, sharing = ppo.on_policy.learner, ppo.on_policy.sharing
        learner.hidden.begin(SAMPLES)
        summed = gradient(way, ppo, experience())
        summed.write(own, 0)
        sharing.pieces.offer([3, 0, 5, 1, 4])  # another worker has number 2
        summed.take(sharing, some_rows(80), bounds, len(own))
        assert sharing.pieces.take() is None
        hidden = torch.zeros_like(learner.grad)
        learner.hidden.write(hidden)
        found.append([learner._own, *(vector.stats._base for vector in learner._vectors[1:]), hidden])
        sharing.pieces.close()
    expected, ours = found
    assert all(is_same(*pair, precision) for pair in zip(ours, expected, strict=True))
    assert expected[-1].any()


def test_a_pass_in_one_call_that_is_wrong_is_noticed():
    """Before the library is used."""
    library = build.load()
    assert native_network.agrees_with_torch(library, "impala")
    with pytest.MonkeyPatch.context() as patch:
        original = native_network._gradients_in_one_call
        patch.setattr(native_network, "_gradients_in_one_call", lambda *args: [2 * part for part in original(*args)])
        assert not native_network.agrees_with_torch(library, "impala")


def test_not_a_number_is_not_lost(precision):
    ppo, batch = make("impala", precision), experience()
    batch.advantages[3] = torch.nan
    ppo.on_policy.gradients.passes(batch, MOMENTS, ppo.objective).write(np.array([3]), 0)
    assert ppo.on_policy.learner.grad.isnan().any()
    assert ppo.on_policy.learner.stats[:-1].isnan().any()


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("num_workers", [2, 3, 16, 17])
def test_a_step_in_parts_is_the_step_of_the_whole(optimizer, num_workers):
    size = 10_007
    torch.manual_seed(3)
    start, gradient = torch.randn(size), torch.randn(size)
    whole = OPTIMIZERS[optimizer](start.clone(), gradient, eps=1e-5)
    parameters, seen = start.clone(), torch.zeros(size)
    for rank in range(num_workers):
        part = WorkSharing.part(SimpleNamespace(rank=rank, _reduce=SimpleNamespace(num_workers=num_workers)), size)
        seen[part] += 1
        own = OPTIMIZERS[optimizer](parameters[part], gradient[part], eps=1e-5)
        for _ in range(3):
            own.step(0.01)
    for _ in range(3):
        whole.step(0.01)
    assert (seen == 1).all(), "everything is stepped once"
    assert torch.equal(parameters, whole.parameters)
