"""torchvision's detection models: prepared in regions, exact, trained a step, converted and run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import random_masks, randomise
from thin_networks import narrow_pyramid, narrow_ssd, narrow_vgg16, short_mobilenet, short_resnet
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.models import detection

import smcp_fx
from smcp_fx.config import MethodConfig

CONFIG = MethodConfig(multiple=1, batch_norm_scaling=True)
SIDE = 64
DETECTORS = {
    "ssdlite320_mobilenet_v3_large": (("backbone", "head"), 0.99),
    "ssd300_vgg16": (("backbone", "head"), 0.99),
    "retinanet_resnet50_fpn": (("backbone", "head"), 0.99),
    "fcos_resnet50_fpn": (("backbone", "head"), 0.99),
    "fasterrcnn_resnet50_fpn": (
        ("backbone", "rpn.head", "roi_heads.box_head", "roi_heads.box_predictor"),
        0.99,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_detection_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    regions, free = DETECTORS[name]
    for file in ("retinanet", "fcos", "faster_rcnn"):  # as torchvision builds them, but for a shallower trunk
        monkeypatch.setattr(f"torchvision.models.detection.{file}.resnet50", short_resnet)
    monkeypatch.setattr("torchvision.models.detection.backbone_utils.BackboneWithFPN", narrow_pyramid)
    monkeypatch.setattr("torchvision.models.detection.ssd.vgg16", narrow_vgg16)
    monkeypatch.setattr("torchvision.models.detection.ssd.SSDFeatureExtractorVGG", narrow_ssd)
    monkeypatch.setattr("torchvision.models.detection.ssdlite.mobilenet_v3_large", short_mobilenet)
    sizes = {} if name.startswith("ssd") else {"min_size": SIDE, "max_size": SIDE}
    if name.startswith("faster"):  # fewer boxes
        sizes |= {
            f"rpn_{when}_nms_top_n_{mode}": 30 for when in ("pre", "post") for mode in ("train", "test")
        }
    else:
        sizes |= {"topk_candidates": 30}
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=5, **sizes)
    count = 1 if name == "ssd300_vgg16" else 2  # it resizes to 300 pixels, and has no norm that needs two
    images = [torch.rand(3, SIDE, SIDE).double() for _ in range(count)]
    model = randomise(model).double().eval()
    prepared = smcp_fx.prepare(model, (images,), config=CONFIG)
    assert prepared.regions == regions
    assert prepared.channels.free_share > free
    for one, other in zip(
        pytree.tree_leaves(run(prepared, images)),
        pytree.tree_leaves(run(model, images)),
        strict=True,
    ):
        assert torch.equal(one, other)
    prepared.set_masks(random_masks(prepared, 0))
    smaller = smcp_fx.convert(prepared)
    assert type(smaller) is type(model)
    assert sum(p.numel() for p in smaller.parameters()) < 0.75 * sum(p.numel() for p in model.parameters())
    # Sorting and suppression of boxes follow the last bit of scores: what goes into them is compared.
    masked, sliced = (what_regions_give(m, regions, images) for m in (prepared, smaller))
    for region in regions:
        assert len(masked[region]) == len(sliced[region]) > 0
        compared = 0
        for one, other in zip(masked[region], sliced[region], strict=True):
            if one.shape == other.shape:
                if region.startswith("roi"):  # a row a box
                    one, other = one.flatten().sort().values, other.flatten().sort().values
                assert_close(other, one, "slicing", region)
                compared += 1
        assert compared or region in ("backbone", "roi_heads.box_head")  # whose outputs may be fewer
    targets = [
        {"boxes": torch.tensor([[5.0, 5.0, 40.0, 50.0]]).double(), "labels": torch.tensor([1])}
        for _ in images
    ]
    for trained in (prepared, smaller):
        trained.train()
        loss = sum(trained(images, targets).values())
        loss.backward()
        assert bool(torch.isfinite(loss))
        reached = [p for p in trained.parameters() if p.grad is not None]
        assert len(reached) > 30
        assert all(bool(torch.isfinite(p.grad).all()) for p in reached)
    prepared.pruner.step()
    assert int(prepared.smcp.gathers) == 1
    assert float(prepared.smcp.gathered.sum()) > 0


def what_regions_give(
    model: nn.Module, regions: tuple[str, ...], images: list[Tensor]
) -> dict[str, list[Tensor]]:
    given: dict[str, list[Tensor]] = {path: [] for path in regions}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda m, args, out, path=path: given[path].extend(t.clone() for t in pytree.tree_leaves(out))
        )
        for path in regions
    ]
    found = run(model, images)
    assert len(found) == len(images)
    for hook in hooks:
        hook.remove()
    return given


def run(model: nn.Module, images: list[Tensor]) -> Any:
    with torch.no_grad():
        return model(images)
