"""The networks: size, layout, precision."""

import pytest
import torch

from rl_cluster_benchmark.config.schema import HardwareConfig, ModelConfig
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.nets.models import ImpalaCNN, NatureCNN, make_model

IMAGES = torch.randint(0, 256, (5, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def model(architecture="auto", memory_format="channels_last", precision=torch.float32, shape=(64, 64, 3), actions=15):
    torch.manual_seed(0)
    hardware = HardwareConfig(memory_format=memory_format)
    return make_model(ModelConfig(architecture=architecture), shape, actions, hardware, precision)


def test_the_default_is_the_published_network():
    network = model()
    assert isinstance(network.trunk, ImpalaCNN)
    assert sum(p.numel() for p in network.parameters()) == 626_256


def test_the_network_follows_the_observation():
    assert type(model(shape=(4,), actions=2).trunk).__name__ == "MLP"
    assert isinstance(model("nature").trunk, NatureCNN)
    with pytest.raises(UserError, match="impala needs images"):
        model("impala", shape=(4,))


@pytest.mark.parametrize("architecture", ["impala", "nature", "mlp"])
def test_outputs(architecture):
    logits, values = model(architecture)(IMAGES if architecture != "mlp" else IMAGES.float())
    assert logits.shape == (5, 15)
    assert values.shape == (5,)
    assert logits.dtype == values.dtype == torch.float32
    assert float(logits.detach().softmax(-1).max()) < 0.2, "the first policy is close to uniform"


@pytest.mark.parametrize("architecture", ["impala", "nature"])
def test_the_memory_format_changes_no_result(architecture):
    results = []
    for memory_format in ("channels_last", "contiguous"):
        network = model(architecture, memory_format)
        logits, values = network(IMAGES)
        (logits.square().sum() + values.sum()).backward()
        gradients = [p.grad.clone() for p in network.parameters()]
        results.append((logits, values, gradients))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, atol=1e-3, rtol=1e-3)


def test_bfloat16_is_close_and_gives_float32():
    exact, values = model()(IMAGES)
    rounded, rounded_values = model(precision=torch.bfloat16)(IMAGES)
    assert rounded.dtype == rounded_values.dtype == torch.float32
    torch.testing.assert_close(rounded_values, values, atol=0.05, rtol=0.05)
    torch.testing.assert_close(rounded, exact, atol=0.01, rtol=0.05)


def test_images_reach_the_convolution_without_a_change_of_layout():
    seen = {}
    network = model()
    network.trunk.stages[0].conv.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    network(IMAGES)
    assert seen["x"].is_contiguous(memory_format=torch.channels_last)
    assert float(seen["x"].max()) <= 1.0
