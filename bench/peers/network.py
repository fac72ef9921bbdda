"""The IMPALA-CNN as a user of these libraries writes it: plain modules, float images [B, 3, 64, 64] from 0 to 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 256


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1(F.relu(self.conv0(F.relu(x)))) + x


class Trunk(nn.Sequential):
    """Images -> 256 features."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for out in (16, 32, 32):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(out), ResidualBlock(out)]
            channels = out
        layers += [nn.Flatten(), nn.ReLU(), nn.Linear(32 * 8 * 8, FEATURES), nn.ReLU()]
        super().__init__(*layers)


def head(outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(FEATURES, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """For scripts that bring a network of their own. Takes images [B, 64, 64, 3] as the game gives them."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.policy = head(num_actions, 0.01)
        self.value = head(1, 1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(observations.permute(0, 3, 1, 2) / 255.0)
        return self.policy(features), self.value(features).squeeze(-1)


def save(path: str, trunk: nn.Module, policy: nn.Module) -> None:
    torch.save({"trunk": trunk.state_dict(), "policy": policy.state_dict()}, path)
