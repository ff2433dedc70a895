"""MobileNet-V1 (Howard et al., 2017, table 1): 569 M multiply-adds and 4.2 M parameters at 224 x 224."""

from __future__ import annotations

from torch import Tensor, nn

#: (channels, stride) of the depthwise separable blocks behind the first convolution
_BLOCKS = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
    (512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1),
)  # fmt: skip
_FIRST = 32


class MobileNetV1(nn.Module):
    """Maps images [N, 3, H, W] to logits [N, classes].

    A 3x3 convolution of stride 2; 13 pairs of a depthwise 3x3 and a pointwise 1x1 convolution, each with
    batch norm and ReLU; the mean over positions; a linear layer.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_normed(nn.Conv2d(3, _FIRST, 3, 2, 1, bias=False))]
        before = _FIRST
        for channels, stride in _BLOCKS:
            layers.append(_normed(nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)))
            layers.append(_normed(nn.Conv2d(before, channels, 1, bias=False)))
            before = channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


def _normed(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True))
