"""The networks in C against the same computation in torch in double precision."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import ROOT, environment, needs_native
from helpers.images import images
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_cluster_benchmark.config.schema import HardwareConfig, ModelConfig
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution import hidden_gradient
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.kernels import native_network
from rl_cluster_benchmark.kernels.native_network import padded
from rl_cluster_benchmark.learning.learner import place_of
from rl_cluster_benchmark.nets.models import make_model

both = pytest.mark.parametrize("architecture", ["impala", "nature"])


def relative_error(ours, theirs):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def decisions(parameters, observations):
    """Return the smallest distance of a unit of the IMPALA-CNN from being switched or a pixel from losing its window.

    In units of the rounding error of float32 at the size of the layer's values.
    """
    found, rounding = [], torch.finfo(torch.float32).eps
    x = observations.permute(0, 3, 1, 2).double() / 255
    *convs, hidden = zip(parameters[0::2], parameters[1::2], strict=True)

    def note(values, scale):
        found.append(float(values.abs().min() / (scale.abs().mean() * rounding)))

    for first in range(0, len(convs), 5):
        x = F.conv2d(x, *convs[first], padding=1)
        windows = F.unfold(F.pad(x, (1, 1, 1, 1), value=-1e9), 3, stride=2).unflatten(1, (-1, 9)).topk(2, dim=2).values
        note(windows[:, :, 0] - windows[:, :, 1], x)
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        for i in (first + 1, first + 3):
            note(x, x)
            inner = F.conv2d(x.relu(), *convs[i], padding=1)
            note(inner, inner)
            x = x + F.conv2d(inner.relu(), *convs[i + 1], padding=1)
    note(x, x)
    last = F.linear(x.relu().permute(0, 2, 3, 1).flatten(1), *hidden)
    note(last, last)
    return min(found)


def parameters_of(model):
    parameters = list(model.trunk.parameters())
    with torch.no_grad():
        for bias in parameters[1::2]:
            bias.uniform_(-0.1, 0.1)
    return parameters


def build_model(
    architecture="impala", channels=(16, 32, 32), hidden_size=256, size=64, precision=torch.float32
):  # fmt: skip
    torch.manual_seed(0)
    config = ModelConfig(architecture=architecture, channels=list(channels), hidden_size=hidden_size)
    model = make_model(config, (size, size, 3), 15, HardwareConfig(), precision, "native")
    assert model.native_trunk is not None
    return model


def in_torch(architecture, parameters, observations, grad, dtype):
    """Return the features and the gradients of all parameters, computed by torch."""
    copies = [parameter.detach().to(dtype).requires_grad_() for parameter in parameters]
    features = native_network.SOURCES[architecture].in_torch(copies, observations)
    return features, torch.autograd.grad((features * grad.to(dtype)).sum(), copies)


def check(model, architecture, observations, hidden_size):
    """Compare features and gradients with torch in double precision.

    Where torch in float32 is hardly better than 1e-5, which depends on the weights, twice its error is allowed.
    """
    parameters = list(model.trunk.parameters())
    grad = torch.randn(len(observations), hidden_size, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    out = model.native_trunk(observations)
    out.backward(grad)
    expected, gradients = in_torch(architecture, parameters, observations, grad, torch.float64)
    _, of_torch = in_torch(architecture, parameters, observations, grad, torch.float32)
    assert relative_error(out, expected) < 2e-6
    with torch.inference_mode():
        assert torch.equal(model.native_trunk(observations), out)
    for ours, theirs, exact in zip(parameters, of_torch, gradients, strict=True):
        assert relative_error(ours.grad, exact) < max(1e-5, 2 * relative_error(theirs, exact))


@needs_native
@pytest.mark.parametrize(
    ("channels", "hidden_size", "size", "batch"),
    [
        ((16, 32, 32), 256, 64, 5), ((32, 64, 64), 256, 64, 2), ((16,), 32, 32, 9), ((48, 80), 64, 32, 3),
        ((16, 16, 32, 32), 64, 64, 3), ((256,), 32, 8, 2), ((112, 16), 32, 16, 6),
    ],
)  # fmt: skip
def test_equals_the_impala_cnn_in_double_precision(channels, hidden_size, size, batch):
    model = build_model("impala", channels, hidden_size, size)
    parameters_of(model)
    check(model, "impala", images(batch, size), hidden_size)


@needs_native
@pytest.mark.parametrize("batch", [33, 70])
def test_many_samples_equal_the_sum_of_few(batch):
    """Of so many, some unit is so close to zero that rounding decides: each few are compared, where none is."""
    model = build_model()
    parameters, observations = parameters_of(model), images(batch)
    grad = torch.randn(batch, 256, generator=torch.Generator().manual_seed(2))
    model.native_trunk(observations).backward(grad)
    whole = [parameter.grad.clone() for parameter in parameters]
    model.zero_grad()
    for some, of_some in zip(observations.split(3), grad.split(3), strict=True):
        model.native_trunk(some).backward(of_some)
    assert all(relative_error(a.grad, b) < 1e-5 for a, b in zip(parameters, whole, strict=True))


@needs_native
@given(
    channels=st.lists(st.integers(1, 7).map(lambda n: 16 * n), min_size=1, max_size=3),
    hidden_size=st.integers(1, 5).map(lambda n: 32 * n), batch=st.integers(1, 6), sides=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=12, deadline=None, derandomize=True)
def test_equals_double_precision_for_any_shape(channels, hidden_size, batch, sides, seed):
    size = sides * 4 * 2 ** len(channels)
    torch.manual_seed(seed)
    config = ModelConfig(architecture="impala", channels=channels, hidden_size=hidden_size)
    model = make_model(config, (size, size, 3), 15, HardwareConfig(), torch.float32, "native")
    parameters, observations = parameters_of(model), images(batch, size)
    assume(decisions([parameter.detach().double() for parameter in parameters], observations) > 30)
    check(model, "impala", observations, hidden_size)


@needs_native
@pytest.mark.parametrize(("batch", "hidden_size"), [(1, 256), (5, 96), (8, 32), (34, 512)])
def test_equals_the_nature_cnn_in_double_precision(batch, hidden_size):
    model = build_model("nature", hidden_size=hidden_size)
    parameters_of(model)
    check(model, "nature", images(batch), hidden_size)


@needs_native
@both
def test_gradients_add_up_over_passes_and_follow_new_weights(architecture, precision):
    model = build_model(architecture, precision=precision)
    observations = images(6)
    first, second = observations[:4], observations[4:]
    model.native_trunk(observations).sum().backward()
    whole = [parameter.grad.clone() for parameter in model.trunk.parameters()]
    for parameter in model.trunk.parameters():
        parameter.grad.zero_()
    model.native_trunk(first).sum().backward()
    model.native_trunk(second).sum().backward()
    for parameter, expected in zip(model.trunk.parameters(), whole, strict=True):
        assert relative_error(parameter.grad, expected) < 1e-4
    before = model.native_trunk(observations).detach()
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})
    assert not torch.allclose(model.native_trunk(observations), before)


def product_of_rows(trunk, passes, columns):
    """The hidden layer's gradient, from rows that passes leave, some columns at a time."""
    width, features = trunk.hidden_weights.shape
    count = sum(map(len, passes))
    shapes, dtype = [(padded(count), n) for n in (features, width)], native_network.DTYPES[trunk.precision]
    rows = native_network.HiddenRows(*(torch.full(shape, math.nan, dtype=dtype) for shape in shapes))
    start = 0
    for observations in passes:
        trunk.rows = native_network.HiddenRows(*(part[start : start + len(observations)] for part in rows))
        trunk(observations).square().sum().backward()
        start += len(observations)
    for part in rows:
        part[count:] = 0
    product = torch.full((width, features), math.nan)
    for first, last in itertools.pairwise((0, *columns, features)):
        trunk.multiply(rows, count, range(first, last), product)
    trunk.rows = None
    return product


@needs_native
@both
@pytest.mark.parametrize("sizes", [(1,), (5, 2, 16, 14), (64,)])
def test_the_hidden_layers_gradient_can_be_made_from_rows(architecture, sizes, precision):
    model = build_model(architecture, precision=precision)
    parameters_of(model)
    passes = images(sum(sizes)).split(list(sizes))
    for observations in passes:
        model.native_trunk(observations).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.trunk.parameters()]
    model.zero_grad(set_to_none=False)
    product = product_of_rows(model.native_trunk, passes, columns=(32, 128, 192))
    gradients = [parameter.grad for parameter in model.trunk.parameters()]
    assert relative_error(product, expected[-2]) < (1e-6 if precision == torch.float32 else 1e-5)
    assert not gradients[-2].any(), "left out of the passes"
    assert all(torch.equal(gradients[i], expected[i]) for i in range(len(expected)) if i != len(expected) - 2)


@needs_native
def test_a_machine_without_samples_of_a_minibatch_adds_nothing(precision):
    """Its workers' vectors still hold something where the passes do not write."""
    model = build_model(precision=precision)
    trunk, size = model.native_trunk, sum(p.numel() for p in model.parameters())
    reduce = SharedMemoryReducer(SharedMemoryReducer.allocate(1, size, 1), 0, PhaseClock())
    memory = hidden_gradient.allocate(tuple(trunk.hidden_weights.shape), 4, trunk.precision)
    hidden = reduce.hidden = HiddenGradient(memory, 0, 1)
    part = place_of(model, trunk.hidden_weights)
    hidden.connect(trunk, part)
    vector = reduce.vector(size).fill_(7.0)
    hidden.begin(0)
    assert not reduce(vector)[part].any()
    assert torch.equal(reduce(vector.fill_(7.0)), torch.full((size,), 7.0)), "no minibatch: a sum like any other"


@needs_native
def test_of_a_pass_with_nan_nothing_is_left(precision):
    """Where tiles read behind an image that is smaller than the one before it in the same memory."""
    model = build_model("impala", (16, 16), 32, 32, precision)
    parameters, observations, found = parameters_of(model), images(2, 32), []
    for factor in (1.0, math.nan, 1.0):
        model.zero_grad()
        model.weights_changed()
        model.native_trunk(observations).backward(torch.full((2, 32), factor))
        found.append([parameter.grad.clone() for parameter in parameters])
    assert all(gradient.isnan().any() for gradient in found[1])
    assert all(torch.equal(*pair) for pair in zip(found[0], found[2], strict=True))


@needs_native
@pytest.mark.parametrize("for_training", [True, False])
def test_a_forward_pass_in_between_is_noticed(for_training):
    model = build_model()
    out = model.native_trunk(images(2))
    with torch.set_grad_enabled(for_training):
        model.native_trunk(images(2))
    with pytest.raises(RuntimeError, match="another forward pass"):
        out.sum().backward()


@needs_native
@both
def test_not_a_number_is_not_lost(architecture, precision):
    model = build_model(architecture, precision=precision)
    with torch.no_grad():
        next(model.trunk.parameters())[3, 1, 1, 1] = math.nan
    model.weights_changed()
    assert model.native_trunk(images(1)).isnan().any()


@needs_native
def test_shapes_it_does_not_compute_are_left_to_torch():
    rest = (15, HardwareConfig(), torch.float32, "native")
    for channels, size in (((8, 16), 64), ((16, 32, 32, 32, 32), 64), ((16,), 36)):
        config = ModelConfig(architecture="impala", channels=list(channels))
        assert make_model(config, (size, size, 3), *rest).native_trunk is None
    for hidden_size, shape in ((40, (64, 64, 3)), (64, (84, 84, 3)), (64, (64, 64, 4))):
        config = ModelConfig(architecture="nature", hidden_size=hidden_size)
        assert make_model(config, shape, *rest).native_trunk is None
    contiguous = HardwareConfig(memory_format="contiguous")
    config = ModelConfig(architecture="nature")
    assert make_model(config, (64, 64, 3), 15, contiguous, torch.float32, "native").native_trunk is None


def test_without_a_compiler_torch_computes(tmp_path):
    code = (
        "from rl_cluster_benchmark.kernels import build, native_network;"
        "print(build.load(), native_network.available('impala'))"
    )
    env = environment() | {"CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


@needs_native
@both
def test_rows_of_many_observations_are_read_where_they_lie(architecture, precision):
    model = build_model(architecture, precision=precision)
    observations, rows = images(20), torch.tensor([7, 0, 19, 7, 3])
    found = []
    for some in ((observations, rows), (observations[rows],)):
        model.zero_grad()
        features, back = model.pass_through(*some)
        back(torch.linspace(-1, 1, features.numel()).view_as(features))
        found.append([features, *(parameter.grad for parameter in model.trunk.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert theirs.any()
        assert torch.equal(ours, theirs)
