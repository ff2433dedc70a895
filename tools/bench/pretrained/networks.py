"""Small networks of the kinds that are pruned: residuals of three kinds, ConvNeXt, a plain stack."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import CNBlock, LayerNorm2d
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock, Bottleneck


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


class BottleneckNet(nn.Module):
    """Two bottlenecks a stage of 24, 48, 96 channels, four times as many outside; the stem halves the image."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 32, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        blocks: list[nn.Module] = []
        before = 32
        for inner in (24, 48, 96):
            stride, width = 2 if blocks else 1, 4 * inner
            fitted = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            blocks += [Bottleneck(before, inner, stride, fitted), Bottleneck(width, inner)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, classes]."""
        return self.head(self.blocks(F.relu(self.norm(self.stem(images)))).mean((2, 3)))


class ConvNeXt(nn.Module):
    """Two of ConvNeXt's blocks a stage of 48, 96, 192 channels; the stem and each stage halve the image."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        widths = (48, 96, 192)
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 2, 2), LayerNorm2d(widths[0], eps=1e-6)]
        for before, width in zip((widths[0], *widths), widths, strict=False):
            if before != width:
                layers += [LayerNorm2d(before, eps=1e-6), nn.Conv2d(before, width, 2, 2)]
            layers += [CNBlock(width, layer_scale=1.0, stochastic_depth_prob=0.0) for _ in range(2)]
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, classes]."""
        return self.head(self.norm(self.features(images).mean((2, 3))))


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
NETWORKS: dict[str, type[nn.Module]] = {
    "resnet": ResNet, "mobilenet": MobileNet, "vgg": VGG, "bottleneck": BottleneckNet, "convnext": ConvNeXt
}  # fmt: skip
#: Of the task's steps, the share after which they learn little more.
STEPS = {"resnet": 1.0, "mobilenet": 0.5, "vgg": 0.5, "bottleneck": 0.5, "convnext": 0.75}
