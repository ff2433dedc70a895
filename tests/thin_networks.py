"""torchvision's networks with fewer blocks and channels, where more of them are only more of the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.ssd import SSDFeatureExtractorVGG
from torchvision.ops.feature_pyramid_network import LastLevelP6P7


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
    widths: list[str | int] = [8, "M", 8, "M", 16, 16, "M", 16, 32, "M", 16, 32, "M"]
    return models.VGG(models.vgg.make_layers(widths), init_weights=False)


def narrow_ssd(trunk: nn.Module, highres: bool) -> SSDFeatureExtractorVGG:
    """What SSD takes from its trunk, with the trunk's few channels where it writes down many."""
    extractor = SSDFeatureExtractorVGG(trunk, highres)
    extractor.scale_weight = nn.Parameter(torch.full((32,), 20.0))
    for blocks in extractor.extra:
        for conv in [m for m in blocks.modules() if isinstance(m, nn.Conv2d)]:
            inputs, outputs = min(conv.in_channels, 32), min(conv.out_channels, 32)
            conv.in_channels, conv.out_channels = inputs, outputs
            conv.weight = nn.Parameter(conv.weight[:outputs, :inputs].detach())
            conv.bias = nn.Parameter(conv.bias[:outputs].detach())
    return extractor


def narrow_pyramid(
    trunk: nn.Module,
    layers: dict[str, str],
    widths: list[int],
    _: int,
    extra_blocks: nn.Module,
    **options: Any,
) -> BackboneWithFPN:
    """A detector's pyramid with a quarter of the channels."""
    if isinstance(extra_blocks, LastLevelP6P7):
        extra_blocks = LastLevelP6P7(64, 64)
    return BackboneWithFPN(trunk, layers, widths, 64, extra_blocks, **options)


def short_mobilenet(weights: None = None, reduced_tail: bool = True, **options: Any) -> models.MobileNetV3:
    """MobileNetV3 with every kind of the small one's blocks, and the strides that SSDlite counts."""
    blocks = [
        (16, 3, 16, 16, True, "RE", 2),
        (16, 3, 72, 24, False, "RE", 2),
        (24, 3, 88, 24, False, "RE", 1),
        (24, 5, 96, 40, True, "HS", 2),
        (40, 5, 120, 48, True, "HS", 2),
        (48, 5, 144, 48, True, "HS", 1),
    ]
    settings = [models.mobilenetv3.InvertedResidualConfig(*block, 1, 1.0) for block in blocks]
    return models.MobileNetV3(settings, 512, **options)


def thin_resnet50(weights: None = None, **options: Any) -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], 10, **options)


def thin_resnext50(weights: None = None) -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], 10, groups=32, width_per_group=4)


def thin_efficientnet(weights: None = None) -> nn.Module:
    blocks = [(1, 3, 1, 16, 8, 1), (6, 3, 2, 8, 12, 2), (6, 5, 2, 12, 20, 1), (6, 3, 2, 20, 40, 1)]
    settings = [models.efficientnet.MBConvConfig(*block) for block in blocks]
    return models.EfficientNet(settings, 0.2, num_classes=10)


def short_googlenet(weights: None = None) -> nn.Module:
    """Six of the nine blocks: the others return as many channels as they read."""
    network = models.GoogLeNet(10, aux_logits=False, init_weights=False)
    for name in ("inception4b", "inception4c", "inception5a"):
        setattr(network, name, nn.Identity())
    return network


def thin_regnet(weights: None = None) -> nn.Module:
    sizes = models.regnet.BlockParams([1, 2, 1], [16, 32, 64], [8, 8, 8], [1, 1, 1], [2, 2, 2], 0.25)
    return models.RegNet(sizes, 10)


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
