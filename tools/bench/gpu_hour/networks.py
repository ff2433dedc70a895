"""The networks of the stages, and the small ones that stand in for them in a trial."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smcp_fx.zoo.models import build_model


class Small(nn.Module):
    """A residual block and two convolutions over images of any size, wide enough for pruning to pay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 64)
        self.first, self.second = nn.Sequential(_conv(64, 128), _conv(128, 64)), _conv(64, 128)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, 10]."""
        x = self.stem(x)
        y: Tensor = self.head(self.second(x + self.first(x)))
        return y


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def network(name: str, small: bool) -> nn.Module:
    """Return a torchvision network with random weights in eval mode, the same ones each time."""
    torch.manual_seed(0)
    return (Small() if small else build_model(f"torchvision:{name}")).eval()


def images(batch: int, small: bool) -> Tensor:
    """Return random images: 224 x 224, or two of 4 x 4."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*((2, 3, 4, 4) if small else (batch, 3, 224, 224)), generator=generator)
