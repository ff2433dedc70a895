"""What the tests of the recipes share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torchvision import models

from smcp_fx.zoo import ssd


@pytest.fixture
def narrow_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """SSD512 with fewer blocks in its trunk and narrow layers, but every map, prior and stride of its own."""
    narrow = tuple((inner // 4, outer // 4, *more) for inner, outer, *more in ssd.SSD512.extras)
    monkeypatch.setattr(ssd, "SSD512", replace(ssd.SSD512, extras=narrow))
    monkeypatch.setattr("torchvision.models.resnet50", _narrow_resnet50)


def _narrow_resnet50(weights: None = None) -> models.ResNet:
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], 10, width_per_group=16)
