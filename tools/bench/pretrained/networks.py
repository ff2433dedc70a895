"""Three small networks of the kinds that are pruned: basic blocks, inverted residuals, a plain stack."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock


class ResNet(nn.Module):
    """Two basic blocks a stage of 32, 64, 128 channels; the stem halves the image. Nine groups."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        widths = (32, 64, 128)
        self.stem = nn.Conv2d(channels, widths[0], 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks: list[nn.Module] = []
        for before, width in zip((widths[0], *widths), widths, strict=False):
            stride = 2 if blocks else 1
            narrow = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            blocks += [
                BasicBlock(before, width, stride, narrow if blocks else None),
                BasicBlock(width, width),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, classes]."""
        return self.head(self.blocks(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


class MobileNet(nn.Module):
    """MobileNetV2's inverted residuals: two of 24, 40, 80 channels, four times as wide inside; a wide last layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        widths = (24, 40, 80)
        layers: list[nn.Module] = [
            nn.Conv2d(channels, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU6()
        ]  # fmt: skip
        for before, width in zip((widths[0], *widths), widths, strict=False):
            stride = 1 if len(layers) == 3 else 2
            layers += [InvertedResidual(before, width, stride, 4), InvertedResidual(width, width, 1, 4)]
        layers += [nn.Conv2d(widths[-1], 160, 1, bias=False), nn.BatchNorm2d(160), nn.ReLU6()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(160, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, classes]."""
        return self.head(self.features(images).mean((2, 3)))


class VGG(nn.Module):
    """Two convolutions a stage of 32, 64, 128 channels with batch norms, each stage halved by max pooling."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for width in (32, 32, 64, 64, 128, 128):
            layers += [nn.Conv2d(before, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if before == width:
                layers.append(nn.MaxPool2d(2))
            before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, classes]."""
        return self.head(self.features(images).mean((2, 3)))


#: Networks by name.
NETWORKS: dict[str, type[nn.Module]] = {"resnet": ResNet, "mobilenet": MobileNet, "vgg": VGG}
#: Of the task's steps, the share after which they learn little more.
STEPS = {"resnet": 1.0, "mobilenet": 0.5, "vgg": 0.5}
