"""SSD with a ResNet-50 trunk, as in the paper's supplement: SSD512-RN50, and its rival SSD300-RN50.

The network maps images to box offsets and class scores. Prior boxes, decoding and suppression are in
`smcp_fx.zoo.boxes`, so that the whole module traces as one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision import models

from smcp_fx.errors import InputError
from smcp_fx.zoo.boxes import prior_boxes


@dataclass(frozen=True)
class Detector:
    """The settings in which SSD300 and SSD512 differ.

    ``size``: pixels per side; ``extras``: (bottleneck channels, channels, stride, padding) of each pair of
    layers behind the trunk; ``scales``: sides of the square priors as shares of the image, one more than
    there are maps; ``ratios``: each map's aspect ratios besides 1.
    """

    size: int
    extras: tuple[tuple[int, int, int, int], ...]
    scales: tuple[float, ...]
    ratios: tuple[tuple[int, ...], ...]


#: Feature maps of 64, 32, 16, 8, 4, 2 and 1 positions per side; scales of Liu et al. (2016) for VOC.
SSD512 = Detector(
    512,
    ((256, 512, 2, 1), (256, 512, 2, 1), *((128, 256, 2, 1),) * 4),
    (0.07, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.05),
    ((2,), (2, 3), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)
#: Feature maps of 38, 19, 10, 5, 3 and 1 positions per side.
SSD300 = Detector(
    300,
    ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0)),
    (0.1, 0.2, 0.37, 0.54, 0.71, 0.88, 1.05),
    ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)


class SSDResNet50(nn.Module):
    """Maps images [N, 3, S, S] to offsets [N, priors, 4], scores [N, priors, classes]; class 0: background.

    The backbone is the first three stages of ResNet-50; the third has stride 1, so that it ends at an eighth
    of the image. Pairs of a 1x1 and a 3x3 convolution with batch norms follow. Each feature map has one 3x3
    convolution for offsets and one for scores.
    """

    def __init__(self, detector: Detector, classes: int = 21) -> None:
        super().__init__()
        self.detector = detector
        self.classes = classes
        resnet = models.resnet50(weights=None)
        for stride_of in (resnet.layer3[0].conv2, resnet.layer3[0].downsample[0]):
            stride_of.stride = (1, 1)
        names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
        self.backbone = nn.Sequential()
        for name in names:
            self.backbone.add_module(name, getattr(resnet, name))
        channels = [resnet.layer3[-1].conv3.out_channels]
        self.extras = nn.ModuleList()
        for bottleneck, width, stride, padding in detector.extras:
            self.extras.append(
                nn.Sequential(
                    nn.Conv2d(channels[-1], bottleneck, 1, bias=False),
                    nn.BatchNorm2d(bottleneck),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(bottleneck, width, 3, stride, padding, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                )
            )
            channels.append(width)
        priors = [2 + 2 * len(ratios) for ratios in detector.ratios]
        self.locations = nn.ModuleList(
            nn.Conv2d(width, count * 4, 3, padding=1) for width, count in zip(channels, priors, strict=True)
        )
        self.confidences = nn.ModuleList(
            nn.Conv2d(width, count * classes, 3, padding=1)
            for width, count in zip(channels, priors, strict=True)
        )
        for part in (self.extras, self.locations, self.confidences):
            for module in part.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.xavier_uniform_(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets and scores; priors in the order of `prior_boxes`."""
        x = self.backbone(images)
        maps = [x]
        for extra in self.extras:
            x = extra(x)
            maps.append(x)
        offsets, scores = [], []
        for features, location, confidence in zip(maps, self.locations, self.confidences, strict=True):
            offsets.append(_by_prior(location(features), 4))
            scores.append(_by_prior(confidence(features), self.classes))
        return torch.cat(offsets, 1), torch.cat(scores, 1)


def feature_sides(detector: Detector, size: int) -> tuple[int, ...]:
    """Return the feature maps' positions per side for ``size`` pixels; `InputError` if a map vanishes."""
    sides = [-(-size // 8)]
    for _, _, stride, padding in detector.extras:
        sides.append((sides[-1] + 2 * padding - 3) // stride + 1)
    if min(sides) < 1:
        raise InputError(
            f"images of {size} pixels are too small for SSD{detector.size}: a feature map vanishes"
        )
    return tuple(sides)


def priors_of(detector: Detector, size: int) -> Tensor:
    """Return the prior boxes [priors, 4] (centres, shares of the image) for images of ``size`` pixels."""
    return prior_boxes(feature_sides(detector, size), detector.scales, detector.ratios)


def ssd512_resnet50(num_classes: int = 21) -> SSDResNet50:
    """Return SSD512 with a ResNet-50 trunk and random weights."""
    return SSDResNet50(SSD512, num_classes)


def ssd300_resnet50(num_classes: int = 21) -> SSDResNet50:
    """Return SSD300 with a ResNet-50 trunk and random weights."""
    return SSDResNet50(SSD300, num_classes)


def _by_prior(values: Tensor, each: int) -> Tensor:
    """Reshape [N, priors per position * each, H, W] to [N, H * W * priors per position, each]."""
    return values.permute(0, 2, 3, 1).reshape(values.shape[0], -1, each)
