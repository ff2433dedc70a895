"""torchvision's networks with fewer blocks and channels, where more of them are only more of the same."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision import models


def narrow_vgg11_bn(weights: None = None) -> nn.Module:
    """VGG's own classifier holds a hundred million parameters."""
    sizes: list[str | int] = [16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128, "M"]
    features = models.vgg.make_layers(sizes, batch_norm=True)
    layers = [
        nn.Linear(128 * 49, 32),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(32, 64),
        nn.ReLU(True),
        nn.Dropout(),
    ]
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *layers, nn.Linear(64, 10))


def short_resnet(weights: None = None, progress: bool = True, **options: Any) -> models.ResNet:
    """A block for each of the four widths, as a detector's trunk."""
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], **options)


def narrow_vgg16(**_: Any) -> models.VGG:
    """Narrow but for the two layers whose widths SSD writes down."""
    widths: list[str | int] = [8, 8, "M", 8, 8, "M", 16, 16, 16, "M", 16, 16, 512, "M", 16, 16, 512, "M"]
    return models.VGG(models.vgg.make_layers(widths), init_weights=False)


def thin_resnet50(weights: None = None) -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], 10)


def thin_resnext50(weights: None = None) -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], 10, groups=32, width_per_group=4)


def thin_densenet(weights: None = None) -> nn.Module:
    return models.DenseNet(32, (3, 2, 2, 2), 64, num_classes=10)


def thin_shufflenet(weights: None = None) -> nn.Module:
    return models.ShuffleNetV2([2, 3, 2], [24, 48, 96, 192, 1024], 10)


def thin_convnext(weights: None = None) -> nn.Module:
    blocks = [(24, 48, 2), (48, 96, 1), (96, 192, 1), (192, None, 1)]
    return models.ConvNeXt([models.convnext.CNBlockConfig(*block) for block in blocks], num_classes=10)


def thin_swin_t(weights: None = None) -> nn.Module:
    """With both kinds of windows."""
    return models.SwinTransformer([4, 4], 48, [2, 2], [3, 6], [7, 7], num_classes=10)
