"""A minibatch in one call of C: the same as pass by pass."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch
from conftest import ROOT, needs_native
from test_native_network import images

from rl_cluster_benchmark.algorithms.minibatch import Batch, InOneCall, Moments, PassByPass
from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.algorithms.reduction import Alone
from rl_cluster_benchmark.config import Config, HardwareConfig, ModelConfig
from rl_cluster_benchmark.execution import hidden_gradient
from rl_cluster_benchmark.execution.claims import Claims
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.kernels import build, network
from rl_cluster_benchmark.models import make_model

SAMPLES, PIECES = 120, 6
MOMENTS = Moments(100.0, 0.1, 1.3)
pytestmark = needs_native
both = pytest.mark.parametrize("architecture", ["impala", "nature"])


class SharedWithNobody:
    """One worker that leaves rows of the hidden layer, and takes every piece."""

    rank, owners, env_ids, fraction = 0, [0], [0], 0.5

    def __init__(self, hidden_shape):
        self.hidden = HiddenGradient(hidden_gradient.allocate(hidden_shape, SAMPLES), 0, 1)
        self.pieces = Claims()
        self.pipe = self.pieces.reading

    def parameters(self, size):
        return torch.zeros(size)

    def moment(self, index, size):
        return torch.zeros(size)

    def part(self, size):
        return slice(0, size)

    def vectors(self, size):
        return list(torch.full((PIECES, size), 7.0))  # to be cleared

    def take(self):
        return iter(self.pieces.take, None)


def make(architecture, *, shared=False):
    torch.manual_seed(0)
    model = make_model(
        ModelConfig(architecture=architecture), (64, 64, 3), 15, HardwareConfig(), torch.bfloat16, "native"
    )
    torch.nn.init.normal_(model.policy_head.weight, std=0.2)
    sharing = SharedWithNobody(tuple(model.native_trunk.hidden_weights.shape)) if shared else None
    ppo = PPO(Config(), model, env_ids=[0], micro_batch=32, reduce=Alone(), sharing=sharing)
    return ppo.on_policy, ppo.objective


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


@both
@pytest.mark.parametrize("count", [1, 17, 70])
def test_is_the_same_as_pass_by_pass(architecture, count):
    learning, objective = make(architecture)
    found = []
    for way in (PassByPass, InOneCall):
        learning.learner.grad.fill_(7.0)
        way(learning, experience(), MOMENTS, objective).add(some_rows(count), 0)
        found.append([learning.learner.grad.clone(), learning.learner.stats.clone()])
    (expected, expected_stats), (ours, stats) = found
    assert expected.any()
    assert torch.equal(ours, expected)
    assert torch.equal(stats, expected_stats)
    assert isinstance(learning.gradient(experience(), MOMENTS, objective), InOneCall), "the way that is taken"


@both
def test_pieces_of_shared_work_are_the_same(architecture):
    bounds, own = (0, 40, 50, 51, 53, 60, 80), some_rows(SAMPLES)[80:]
    found = []
    for way in (PassByPass, InOneCall):
        learning, objective = make(architecture, shared=True)
        learner, sharing = learning.learner, learning.sharing
        learner.hidden.begin(SAMPLES)
        gradient = way(learning, experience(), MOMENTS, objective)
        gradient.add(own, 0)
        sharing.pieces.offer([3, 0, 5, 1, 4])  # another worker has number 2
        gradient.take(sharing, some_rows(80), bounds, len(own))
        assert sharing.pieces.take() is None
        vectors = [learner._own, *(vector.stats._base for vector in learner._vectors[1:])]
        hidden = torch.zeros_like(learner.grad)
        learner.hidden.write(hidden)
        found.append([*vectors, hidden])
        sharing.pieces.close()
    expected, ours = found
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
    assert expected[-1].any()


def test_the_code_for_amx_is_the_same_as_pass_by_pass(tmp_path):
    """With the tiles emulated in plain C: few machines have them."""
    library = tmp_path / "emulated.so"
    source, header = network.SOURCES["impala"], ROOT / "tests" / "emulated_amx.h"
    command = ["cc", *build.FLAGS, "-include", str(header), str(build.FOLDER / source.file), "-o", str(library)]
    subprocess.run(command, check=True)
    learning, objective = make("impala")
    emulated = ctypes.CDLL(str(library))
    parameters = list(learning.model.trunk.parameters())
    learning.model.native_trunk = network._make(emulated, source, (64, 64, 3), [16, 32, 32], parameters)
    found = []
    for way in (PassByPass, InOneCall):
        way(learning, experience(), MOMENTS, objective).add(some_rows(19), 0)
        found.append(learning.learner.grad.clone())
    assert found[0].any()
    assert torch.equal(*found)


def test_not_a_number_is_not_lost():
    learning, objective = make("impala")
    batch = experience()
    batch.advantages[3] = torch.nan
    learning.gradient(batch, MOMENTS, objective).add(np.array([3]), 0)
    assert learning.learner.grad.isnan().any()
    assert learning.learner.stats[:-1].isnan().any()
