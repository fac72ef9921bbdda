"""The code for AMX, with emulated tiles, against the same computation in torch, rounded in the same places."""

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import needs_native
from helpers.images import images

from rl_cluster_benchmark.config.schema import HardwareConfig, ModelConfig
from rl_cluster_benchmark.kernels import native_network
from rl_cluster_benchmark.nets.models import make_model

pytestmark = needs_native
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
    """What impala.h computes, written down with torch's operations in double precision."""
    stored = Rounded.apply
    x, convs, hidden = rounded_inputs(parameters, observations)
    for first in range(0, len(convs), 5):
        x = F.max_pool2d(stored(F.conv2d(x, *convs[first], padding=1)), kernel_size=3, stride=2, padding=1)
        for i in (first + 1, first + 3):
            inner = stored(F.conv2d(x.relu(), *convs[i], padding=1).relu())
            x = stored(x + F.conv2d(inner, *convs[i + 1], padding=1))
    return F.linear(x.relu().permute(0, 2, 3, 1).flatten(1), *hidden).relu()


def rounded_nature(parameters, observations):
    """What nature.h computes."""
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


@pytest.fixture
def build_model(with_amx):
    def build(architecture, channels=(16, 32, 32), hidden_size=256, size=64):
        with_amx()
        torch.manual_seed(0)
        config = ModelConfig(architecture=architecture, channels=list(channels), hidden_size=hidden_size)
        model = make_model(config, (size, size, 3), 15, HardwareConfig(), torch.bfloat16, "native")
        assert model.native_trunk.precision == "bfloat16"
        return model

    return build


def relative_error(ours, theirs):
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("channels", "hidden_size", "size", "batch"),
    [((16, 32, 32), 256, 64, 5), ((32, 64, 64), 256, 64, 2), ((16,), 32, 32, 33), ((48, 80), 64, 32, 17)],
)
def test_equals_the_same_impala_cnn_in_torch(build_model, channels, hidden_size, size, batch):
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


@pytest.mark.parametrize(("batch", "hidden_size"), [(1, 256), (5, 96), (8, 32), (34, 512)])
def test_equals_the_same_nature_cnn_in_torch(build_model, batch, hidden_size):
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


@both
def test_is_as_close_to_float32_as_torch_in_bfloat16(build_model, architecture):
    model = build_model(architecture)
    observations = images(8)
    parameters_of(model)
    exact = native_network.SOURCES[architecture].in_torch(list(model.trunk.parameters()), observations)
    ours = model.native_trunk(observations)
    model.native_trunk = None
    theirs = model.features(observations)
    assert relative_error(ours, exact) < 1.2 * relative_error(theirs, exact) < 0.02


def test_shapes_that_only_float32_has_are_left_to_others(with_amx):
    with_amx()
    for channels, size in (((16, 32, 32, 32), 64), ((16,), 8)):
        found = []
        for precision in (torch.float32, torch.bfloat16):
            config = ModelConfig(architecture="impala", channels=list(channels))
            model = make_model(config, (size, size, 3), 15, HardwareConfig(), precision, "native")
            found.append(model.native_trunk is not None)
        assert found == [True, False]
