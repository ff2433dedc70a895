"""What the tests of the recipes share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from thin_networks import thin_resnet50

from smcp_fx.zoo import ssd


@pytest.fixture
def narrow_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    """SSD512 with fewer blocks in its trunk and narrow layers, but every map, prior and stride of its own."""
    narrow = tuple((inner // 4, outer // 4, *more) for inner, outer, *more in ssd.SSD512.extras)
    monkeypatch.setattr(ssd, "SSD512", replace(ssd.SSD512, extras=narrow))
    monkeypatch.setattr("torchvision.models.resnet50", partial(thin_resnet50, width_per_group=16))
