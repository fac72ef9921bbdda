"""The networks, which map observations as the environment gives them to action logits and a state value in float32.

Images stay uint8 [B, H, W, C] until the network scales them. Permuted, such a batch *is* a channels-last tensor, so
nothing is copied for the change of layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_cluster_benchmark.config.schema import Config, HardwareConfig, ModelConfig
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.kernels.native_network import NativeTrunk, make_trunk

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
NATURE_CONVS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # output channels, kernel, stride


class ActorCritic(nn.Module):
    """A network of a trunk, which computes features, and a linear policy head and a linear value head on these.

    The trunk may compute in bfloat16; the heads, and everything after them, are float32.
    """

    def __init__(
        self,
        trunk: nn.Module,
        feature_size: int,
        num_actions: int,
        *,
        precision: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.policy_head = _orthogonal(nn.Linear(feature_size, num_actions), gain=0.01)
        self.value_head = _orthogonal(nn.Linear(feature_size, 1), gain=1.0)
        self.precision = precision
        self.memory_format = memory_format
        self.native_trunk: NativeTrunk | None = None
        self.register_load_state_dict_post_hook(lambda model, _: model.weights_changed())

    def weights_changed(self) -> None:
        """Tell the native trunk, which keeps a packed copy of the weights, that they changed.

        Everything that writes to the parameters must call this.
        """
        if self.native_trunk is not None:
            self.native_trunk.stale = True

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.features(observations))

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy_head(features), self.value_head(features).squeeze(-1)

    def pass_through(self, observations: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the features of the observations, or of these rows of them, and a function for the backward pass.

        For training: the function takes the gradient of the features, [B, F], and adds to the parameters' gradients.
        """
        if self.native_trunk is not None:
            return self.native_trunk.pass_through(observations, rows)
        if rows is not None:
            observations = observations.index_select(0, rows)
        with torch.enable_grad():
            features = self.features(observations)

        def back(gradient: Tensor) -> None:
            with torch.enable_grad():  # backward() with an argument would import sympy, which takes half a second
                (features * gradient).sum().backward()

        return features.detach(), back

    def features(self, observations: Tensor) -> Tensor:
        if self.native_trunk is not None:
            return self.native_trunk(observations)
        if observations.dtype == torch.uint8:
            observations = observations.permute(0, 3, 1, 2).to(self.precision).div_(255)
            observations = observations.contiguous(memory_format=self.memory_format)
        if self.precision == torch.float32:
            return self.trunk(observations)
        with torch.autocast(observations.device.type, dtype=self.precision):
            features: Tensor = self.trunk(observations)
        return features.float()


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv0(F.relu(x))
        out = self.conv1(F.relu_(out))
        return out.add_(x)


class ConvStage(nn.Module):
    """A stage of the IMPALA-CNN: a convolution, max-pooling that halves the image, two residual blocks."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.block0 = ResidualBlock(out_channels)
        self.block1 = ResidualBlock(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x), kernel_size=3, stride=2, padding=1)
        return self.block1(self.block0(x))


class ImpalaCNN(nn.Module):
    """The residual network of the IMPALA paper, the standard one on Procgen."""

    def __init__(self, image_shape: Sequence[int], channels: Sequence[int], hidden_size: int) -> None:
        super().__init__()
        height, width, in_channels = image_shape
        stages = []
        for out_channels in channels:
            stages.append(ConvStage(in_channels, out_channels))
            in_channels, height, width = out_channels, math.ceil(height / 2), math.ceil(width / 2)
        self.stages = nn.Sequential(*stages)
        self.hidden = nn.Linear(in_channels * height * width, hidden_size)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):  # initialised as for the published Procgen results
                nn.init.xavier_uniform_(layer.weight)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.stages(x))
        return F.relu_(self.hidden(flatten_images(x)))


class NatureCNN(nn.Module):
    """The network of the DQN paper in Nature: three plain convolutions."""

    def __init__(self, image_shape: Sequence[int], hidden_size: int) -> None:
        super().__init__()
        height, width, channels = image_shape
        convs = []
        for out_channels, kernel, stride in NATURE_CONVS:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            if height < 1 or width < 1:
                raise UserError("model.architecture = nature needs images of at least 36 x 36; use impala or mlp.")
            convs += [_orthogonal(nn.Conv2d(channels, out_channels, kernel, stride)), nn.ReLU(inplace=True)]
            channels = out_channels
        self.convs = nn.Sequential(*convs)
        self.hidden = _orthogonal(nn.Linear(channels * height * width, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.hidden(flatten_images(self.convs(x))))


class MLP(nn.Module):
    def __init__(self, input_size: int, sizes: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [_orthogonal(nn.Linear(input_size, size)), nn.Tanh()]
            input_size = size
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


def flatten_images(x: Tensor) -> Tensor:
    """Flatten images [B, C, H, W] to [B, H * W * C], as a view when they are channels-last.

    The order of the features does not depend on the memory format.
    """
    return x.permute(0, 2, 3, 1).flatten(1)


def make_model(
    config: ModelConfig,
    observation_shape: Sequence[int],
    num_actions: int,
    hardware: HardwareConfig,
    precision: torch.dtype,
    engine: str = "torch",
) -> ActorCritic:
    is_image = len(observation_shape) == 3
    architecture = config.architecture
    if architecture == "auto":
        architecture = "impala" if is_image else "mlp"
    if architecture != "mlp" and not is_image:
        raise UserError(
            f"model.architecture = {architecture} needs images, but observations have shape "
            f"{tuple(observation_shape)}; use mlp or auto."
        )
    trunk: nn.Module
    if architecture == "impala":
        trunk, features = ImpalaCNN(observation_shape, config.channels, config.hidden_size), config.hidden_size
    elif architecture == "nature":
        trunk, features = NatureCNN(observation_shape, config.hidden_size), config.hidden_size
    else:
        trunk, features = MLP(math.prod(observation_shape), config.mlp_sizes), config.mlp_sizes[-1]
    memory_format = torch.channels_last if hardware.memory_format == "channels_last" else torch.contiguous_format
    # Vectors are too small for bfloat16 to pay.
    model = ActorCritic(
        trunk,
        features,
        num_actions,
        precision=precision if is_image else torch.float32,
        memory_format=memory_format,
    )
    model = model.to(hardware.device).to(memory_format=memory_format)  # type: ignore[call-overload]
    if engine == "native" and isinstance(trunk, ImpalaCNN | NatureCNN):
        channels = config.channels if architecture == "impala" else [conv[0] for conv in NATURE_CONVS]
        in_c = "bfloat16" if precision == torch.bfloat16 else "float32"
        model.native_trunk = make_trunk(architecture, observation_shape, channels, list(trunk.parameters()), in_c)
    return model


def num_weights(config: Config) -> int:
    """Return about how many weights the network of a config has, without making it."""
    model = config.model
    if config.env.game is None or model.architecture == "mlp":
        sizes = [1 if config.env.game is None else 64 * 64 * 3, *model.mlp_sizes]
        return sum(a * b for a, b in itertools.pairwise(sizes))
    if model.architecture == "nature":
        return 1024 * model.hidden_size
    convs = sum(9 * (a * b + 4 * b * b) for a, b in itertools.pairwise([3, *model.channels]))
    side = math.ceil(64 / 2 ** min(6, len(model.channels)))
    return convs + side * side * model.channels[-1] * model.hidden_size


def _orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
