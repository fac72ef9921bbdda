"""The C code against the same computation in torch: networks, rounded to bfloat16 in the same places, and pooling."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import ROOT, environment, needs_native
from helpers.images import images

from rl_cluster_benchmark.config.schema import HardwareConfig, ModelConfig
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution import hidden_gradient
from rl_cluster_benchmark.execution.hidden_gradient import HiddenGradient
from rl_cluster_benchmark.execution.reduce import SharedMemoryReducer
from rl_cluster_benchmark.kernels import native_network, pooling
from rl_cluster_benchmark.learning.learner import place_of
from rl_cluster_benchmark.nets.models import make_model

both = pytest.mark.parametrize("architecture", ["impala", "nature"])


class Rounded(torch.autograd.Function):
    """A value, and later its gradient, stored in bfloat16."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().to(grad.dtype)


def rounded_inputs(parameters, observations):
    """The image, the convolutions' parameters and those of the hidden layer."""
    x = Rounded.apply((observations.permute(0, 3, 1, 2).float() * (1 / 255)).double())
    weights = [weight.bfloat16().double() for weight in parameters[0::2]]
    *convs, hidden = zip(weights, (bias.double() for bias in parameters[1::2]), strict=True)
    return x, convs, hidden


def rounded_impala(parameters, observations):
    """What network.c computes, written down with torch's operations in double precision."""
    stored = Rounded.apply
    x, convs, hidden = rounded_inputs(parameters, observations)
    for first in range(0, len(convs), 5):
        x = F.max_pool2d(stored(F.conv2d(x, *convs[first], padding=1)), kernel_size=3, stride=2, padding=1)
        for i in (first + 1, first + 3):
            inner = stored(F.conv2d(x.relu(), *convs[i], padding=1).relu())
            x = stored(x + F.conv2d(inner, *convs[i + 1], padding=1))
    return F.linear(x.relu().permute(0, 2, 3, 1).flatten(1), *hidden).relu()


def rounded_nature(parameters, observations):
    """What nature.c computes."""
    x, convs, hidden = rounded_inputs(parameters, observations)
    for conv, stride in zip(convs, (4, 2, 1), strict=True):
        x = Rounded.apply(F.conv2d(x, *conv, stride=stride).relu())
    return F.linear(x.permute(0, 2, 3, 1).flatten(1), *hidden).relu()


def parameters_of(model):
    parameters = list(model.trunk.parameters())
    with torch.no_grad():
        for bias in parameters[1::2]:
            bias.uniform_(-0.1, 0.1)
    return parameters


def build_model(architecture="impala", channels=(16, 32, 32), hidden_size=256, size=64):
    torch.manual_seed(0)
    config = ModelConfig(architecture=architecture, channels=list(channels), hidden_size=hidden_size)
    model = make_model(config, (size, size, 3), 15, HardwareConfig(), torch.bfloat16, "native")
    assert model.native_trunk is not None
    return model


def relative_error(ours, theirs):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@needs_native
@pytest.mark.parametrize(
    ("channels", "hidden_size", "size", "batch"),
    [((16, 32, 32), 256, 64, 5), ((32, 64, 64), 256, 64, 2), ((16,), 32, 32, 33), ((48, 80), 64, 32, 17)],
)
def test_equals_the_same_computation_in_torch(channels, hidden_size, size, batch):
    model = build_model("impala", channels, hidden_size, size)
    parameters, observations = parameters_of(model), images(batch, size)
    grad = torch.randn(batch, hidden_size, generator=torch.Generator().manual_seed(2))
    out = model.native_trunk(observations)
    out.backward(grad)
    expected = rounded_impala(parameters, observations)
    assert relative_error(out, expected) < 0.003
    gradients = torch.autograd.grad(expected, parameters, grad)
    for parameter, theirs in zip(parameters, gradients, strict=True):
        assert torch.cosine_similarity(parameter.grad.flatten().double(), theirs.flatten().double(), dim=0) > 0.98
    with torch.inference_mode():
        assert torch.equal(model.native_trunk(observations), out)


@needs_native
@pytest.mark.parametrize(("batch", "hidden_size"), [(1, 256), (5, 96), (8, 32), (34, 512)])
def test_the_nature_cnn_equals_the_same_computation_in_torch(batch, hidden_size):
    model = build_model("nature", hidden_size=hidden_size)
    parameters, observations = parameters_of(model), images(batch)
    grad = torch.randn(batch, hidden_size, generator=torch.Generator().manual_seed(2))
    out = model.native_trunk(observations)
    out.backward(grad)
    expected = rounded_nature(parameters, observations)
    assert relative_error(out, expected) < 0.001
    gradients = torch.autograd.grad(expected, parameters, grad.bfloat16().double())
    for parameter, theirs in zip(parameters, gradients, strict=True):
        assert relative_error(parameter.grad, theirs) < 0.02
    with torch.inference_mode():
        assert torch.equal(model.native_trunk(observations), out)


@needs_native
@both
def test_is_as_close_to_float32_as_torch_in_bfloat16(architecture):
    model = build_model(architecture)
    observations = images(8)
    parameters_of(model)
    exact = native_network.SOURCES[architecture].in_torch(list(model.trunk.parameters()), observations)
    ours = model.native_trunk(observations)
    model.native_trunk = None
    theirs = model.features(observations)
    assert relative_error(ours, exact) < 1.2 * relative_error(theirs, exact) < 0.02


@needs_native
@both
def test_gradients_add_up_over_passes_and_follow_new_weights(architecture):
    model = build_model(architecture)
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
    padded = -(-count // 32) * 32
    rows = native_network.HiddenRows(
        *(torch.full((padded, n), math.nan, dtype=torch.bfloat16) for n in (features, width))
    )
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
def test_the_hidden_layers_gradient_can_be_made_from_rows(architecture, sizes):
    model = build_model(architecture)
    parameters_of(model)
    passes = images(sum(sizes)).split(list(sizes))
    for observations in passes:
        model.native_trunk(observations).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.trunk.parameters()]
    model.zero_grad(set_to_none=False)
    product = product_of_rows(model.native_trunk, passes, columns=(16, 112, 192))
    gradients = [parameter.grad for parameter in model.trunk.parameters()]
    assert relative_error(product, expected[-2]) < 1e-5
    assert not gradients[-2].any(), "left out of the passes"
    assert all(torch.equal(gradients[i], expected[i]) for i in range(len(expected)) if i != len(expected) - 2)


@needs_native
def test_a_machine_without_samples_of_a_minibatch_adds_nothing():
    """Its workers' vectors still hold something where the passes do not write."""
    model = build_model()
    trunk, size = model.native_trunk, sum(p.numel() for p in model.parameters())
    reduce = SharedMemoryReducer(SharedMemoryReducer.allocate(1, size, 1), 0, PhaseClock())
    hidden = reduce.hidden = HiddenGradient(hidden_gradient.allocate(tuple(trunk.hidden_weights.shape), 4), 0, 1)
    part = place_of(model, trunk.hidden_weights)
    hidden.connect(trunk, part)
    vector = reduce.vector(size).fill_(7.0)
    hidden.begin(0)
    assert not reduce(vector)[part].any()
    assert torch.equal(reduce(vector.fill_(7.0)), torch.full((size,), 7.0)), "no minibatch: a sum like any other"


@needs_native
def test_of_a_pass_with_nan_nothing_is_left():
    """Where tiles read behind an image that is smaller than the one before it in the same memory."""
    model = build_model("impala", (16, 16), 32, 32)
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
def test_not_a_number_is_not_lost(architecture):
    model = build_model(architecture)
    with torch.no_grad():
        next(model.trunk.parameters())[3, 1, 1, 1] = math.nan
    model.weights_changed()
    assert model.native_trunk(images(1)).isnan().any()


@needs_native
def test_shapes_it_does_not_compute_are_left_to_torch():
    rest = (15, HardwareConfig(), torch.bfloat16, "native")
    for channels, size in (((8, 16), 64), ((16, 32, 32, 32), 64), ((16,), 36)):
        config = ModelConfig(architecture="impala", channels=list(channels))
        assert make_model(config, (size, size, 3), *rest).native_trunk is None
    for hidden_size, shape in ((40, (64, 64, 3)), (64, (84, 84, 3)), (64, (64, 64, 4))):
        config = ModelConfig(architecture="nature", hidden_size=hidden_size)
        assert make_model(config, shape, *rest).native_trunk is None
    contiguous = HardwareConfig(memory_format="contiguous")
    config = ModelConfig(architecture="nature")
    assert make_model(config, (64, 64, 3), 15, contiguous, torch.bfloat16, "native").native_trunk is None


@needs_native
@both
def test_the_code_for_amx_agrees_with_torch_too(with_emulated_tiles, architecture):
    source, emulated = native_network.SOURCES[architecture], with_emulated_tiles(architecture)
    assert native_network.agrees_with_torch(emulated, source)
    batch, channels = {"impala": (1, [48, 16]), "nature": (9, [32, 64, 64])}[architecture]  # odd blocks; groups of 8
    model = build_model(architecture, channels)
    observations, parameters = images(batch), parameters_of(model)
    with torch.no_grad():  # every unit is far from zero: one that rounding switches on or off has another gradient
        parameters[-1].copy_(2.0 - 4.0 * (torch.arange(len(parameters[-1])) % 2))
    model.weights_changed()
    results = []
    for trunk in (model.native_trunk, native_network._make(emulated, source, (64, 64, 3), channels, parameters)):
        model.zero_grad()
        out = trunk(observations)
        out.sum().backward()
        product = product_of_rows(trunk, [observations], columns=(48, 64))
        results.append([out, product, *(parameter.grad for parameter in parameters)])
    assert all(relative_error(ours, theirs) < 0.02 for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 16, 64, 64), (3, 32, 7, 9), (2, 48, 1, 2)])
def test_pooling_kernel(dtype, shape):
    if not pooling.available():
        pytest.skip("no C compiler here")
    torch.manual_seed(0)
    images = torch.randn(shape).mul(2).round().div(2).to(dtype).contiguous(memory_format=torch.channels_last)
    ours, theirs = images.clone().requires_grad_(), images.clone().requires_grad_()
    pooled, expected = pooling.max_pool(ours), torch.nn.functional.max_pool2d(theirs, 3, 2, 1)
    assert type(pooled.grad_fn).__name__ == "_MaxPoolBackward"
    torch.testing.assert_close(pooled, expected, rtol=0, atol=0)
    grad = torch.randn_like(expected)
    pooled.backward(grad)
    expected.backward(grad)
    tolerance = 0.0 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


def test_without_a_compiler_torch_pools(tmp_path):
    code = (
        "import torch; from rl_cluster_benchmark.kernels import pooling;"
        "x = torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last);"
        "print(pooling.available(), torch.equal(pooling.max_pool(x), torch.nn.functional.max_pool2d(x, 3, 2, 1)))"
    )
    env = environment() | {"CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@needs_native
@pytest.mark.parametrize("architecture", ["impala", "nature"])
def test_rows_of_many_observations_are_read_where_they_lie(architecture):
    model = build_model(architecture)
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
