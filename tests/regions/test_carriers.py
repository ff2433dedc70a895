"""Feature maps that Python pools between regions: the pooled channels go with theirs if nothing else reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from region_models import IMAGES, check_exact, group, prepare
from test_regions import Levels
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, RoIAlign, RoIPool

BOXES = torch.tensor([[1.0, 2.0, 9.0, 12.0], [4.0, 0.0, 15.0, 7.0], [0.0, 0.0, 6.0, 6.0]])


class TwoStages(nn.Module):
    """Maps of two levels, boxes that depend on values, and a head for what is cut out of the maps."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Levels()
        self.score = nn.Conv2d(6, 1, 1)
        self.pool = MultiScaleRoIAlign(["0", "1"], 2, 2, canonical_scale=16)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))

    def pooled(self, maps: dict[str, Tensor], boxes: list[Tensor]) -> Tensor:
        return self.pool(maps, boxes, [(16, 16)] * len(boxes))

    def between(self, maps: dict[str, Tensor], pooled: Tensor) -> Tensor:
        return pooled

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.trunk(x)
        score = self.score(maps["0"])
        shift = 1.0 if score.mean() > 1e6 else 0.0  # no graph can hold this
        boxes = [BOXES.to(x) + shift for _ in x]
        return self.head(self.between(maps, self.pooled(maps, boxes))), score


class OneLevel(TwoStages):
    """One map, and boxes as rows with the image's number."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def pooled(self, maps: dict[str, Tensor], boxes: list[Tensor]) -> Tensor:
        numbered = torch.cat([boxes[0].new_zeros(3, 1), boxes[0]], 1)
        return self.pool(maps["0"], numbered)


class ReadsPooled(TwoStages):
    def between(self, maps: dict[str, Tensor], pooled: Tensor) -> Tensor:
        self.seen = float(pooled.sum())
        return pooled


class ChangesPooledInTraining(TwoStages):
    def between(self, maps: dict[str, Tensor], pooled: Tensor) -> Tensor:
        return pooled + 1 if self.training else pooled


class ReadsMaps(TwoStages):
    def between(self, maps: dict[str, Tensor], pooled: Tensor) -> Tensor:
        self.seen = float(maps["1"].sum())
        return pooled


class ChangesMapsFirst(TwoStages):
    def pooled(self, maps: dict[str, Tensor], boxes: list[Tensor]) -> Tensor:
        return super().pooled({name: one * 2 for name, one in maps.items()}, boxes)


@pytest.mark.parametrize(
    "made",
    [TwoStages, lambda: OneLevel(RoIAlign(2, 1.0, 2)), lambda: OneLevel(RoIPool(2, 1.0))],
    ids=["levels", "align", "pool"],
)
def test_channels_of_maps_go_with_what_is_pooled_of_them(made: Any) -> None:
    prepared = prepare(made())
    assert group(prepared, "trunk.across.0").free
    assert "head.1" in group(prepared, "trunk.across.0").consumers
    check_exact(prepared, (IMAGES,))


def test_a_step_trains_what_is_pooled_and_more_boxes_fit() -> None:
    prepared = prepare(TwoStages())
    found, score = prepared.train()(torch.cat([IMAGES, IMAGES]))
    (found.square().sum() + score.square().sum()).backward()
    prepared.pruner.step()
    assert float(prepared.smcp.gathered.sum()) > 0


@pytest.mark.parametrize("kind", [ReadsPooled, ChangesPooledInTraining, ReadsMaps, ChangesMapsFirst])
def test_what_python_reads_of_maps_or_pooled_ones_stays(kind: type[TwoStages]) -> None:
    prepared = prepare(kind())
    assert not group(prepared, "trunk.across.1").free
    check_exact(prepared, (IMAGES,))
