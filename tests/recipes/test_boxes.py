"""Prior boxes, matching, the loss and suppression against torchvision's own SSD and against loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import _utils as torchvision_detection
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_convert, box_iou, nms

from smcp_fx.recipes.multibox import multibox_loss
from smcp_fx.zoo.boxes import Suppression, decode, detections, encode, match
from smcp_fx.zoo.ssd import SSD300, SSD512, Detector, feature_sides, priors_of


@pytest.mark.parametrize(
    ("detector", "sides"), [(SSD512, (64, 32, 16, 8, 4, 2, 1)), (SSD300, (38, 19, 10, 5, 3, 1))]
)
def test_priors_are_torchvisions(detector: Detector, sides: tuple[int, ...]) -> None:
    assert feature_sides(detector, detector.size) == sides
    expected = DefaultBoxGenerator(
        [list(ratios) for ratios in detector.ratios], scales=list(detector.scales), clip=False
    )
    maps = [torch.zeros(1, 1, side, side) for side in sides]
    images = ImageList(torch.zeros(1, 3, detector.size, detector.size), [(detector.size,) * 2])
    priors = priors_of(detector, detector.size)
    corners = box_convert(priors, "cxcywh", "xyxy") * detector.size
    torch.testing.assert_close(corners, expected(images, maps)[0], rtol=0, atol=1e-3 * 1)
    each = {512: (4, 6, 6, 6, 6, 4, 4), 300: (4, 6, 6, 6, 4, 4)}[detector.size]
    count = sum(side * side * boxes for side, boxes in zip(sides, each, strict=True))
    assert len(priors) == count == {512: 24564, 300: 8732}[detector.size]


def random_boxes(count: int, generator: torch.Generator) -> Tensor:
    start = torch.rand(count, 2, generator=generator) * 0.7
    return torch.cat([start, start + 0.05 + torch.rand(count, 2, generator=generator) * 0.25], 1)


def test_offsets_are_torchvisions_and_come_back() -> None:
    generator = torch.Generator().manual_seed(3)
    priors = priors_of(SSD512, 64)
    boxes = random_boxes(len(priors), generator)
    offsets = encode(boxes, priors)
    coder = torchvision_detection.BoxCoder(weights=(10.0, 10.0, 5.0, 5.0))
    torch.testing.assert_close(offsets, coder.encode_single(boxes, box_convert(priors, "cxcywh", "xyxy")))
    torch.testing.assert_close(decode(offsets, priors), boxes)


def test_matching_against_loops_and_torchvision() -> None:
    generator = torch.Generator().manual_seed(4)
    priors = priors_of(SSD512, 96)
    corners = box_convert(priors, "cxcywh", "xyxy")
    forced = 0
    for _ in range(10):
        boxes, labels = random_boxes(5, generator), torch.randint(1, 21, (5,), generator=generator)
        offsets, found = match(boxes, labels, priors)
        overlaps = [[iou(box, prior) for prior in corners.tolist()] for box in boxes.tolist()]
        expected = []
        for place in range(len(priors)):
            best = max(range(5), key=lambda b: overlaps[b][place])
            expected.append(best if overlaps[best][place] >= 0.5 else -1)
        for box in range(5):
            own = max(range(len(priors)), key=lambda p: overlaps[box][p])
            forced += expected[own] != box
            expected[own] = box
        assert found.tolist() == [0 if owner < 0 else int(labels[owner]) for owner in expected]
        theirs = torchvision_detection.SSDMatcher(0.5)(box_iou(boxes, corners))
        assert (theirs >= 0).tolist() == (found > 0).tolist()
        held = found > 0
        torch.testing.assert_close(
            decode(offsets, priors)[held], boxes[torch.tensor(expected)[held]], atol=1e-6, rtol=0
        )
    assert forced > 0  # some boxes are small enough to need a prior of their own
    empty, none = match(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), priors)
    assert empty.shape == priors.shape and not none.any()


def iou(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return shared / (sum(areas) - shared)


def test_loss_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    priors = priors_of(SSD512, 64)
    offsets = torch.randn(2, len(priors), 4, generator=generator)
    scores = torch.randn(2, len(priors), 7, generator=generator)
    targets = [
        {"boxes": random_boxes(n, generator), "labels": torch.randint(1, 7, (n,), generator=generator)}
        for n in (3, 1)
    ]
    total, objects = 0.0, 0
    for image, target in enumerate(targets):
        wanted, labels = match(target["boxes"], target["labels"], priors)
        surprise = [
            -float(row.log_softmax(0)[label]) for row, label in zip(scores[image], labels, strict=True)
        ]
        held = [place for place in range(len(priors)) if labels[place]]
        backgrounds = sorted(
            (s for s, label in zip(surprise, labels, strict=True) if not label), reverse=True
        )
        total += sum(surprise[place] for place in held) + sum(backgrounds[: 3 * len(held)])
        for place in held:
            for miss in (offsets[image, place] - wanted[place]).abs().tolist():
                total += 0.5 * miss**2 if miss < 1 else miss - 0.5
        objects += len(held)
    assert float(multibox_loss(offsets, scores, targets, priors)) == pytest.approx(total / objects, rel=1e-5)


def test_loss_without_objects_is_nothing_and_has_gradients() -> None:
    priors = priors_of(SSD512, 64)
    offsets, scores = (torch.randn(1, len(priors), k, requires_grad=True) for k in (4, 7))
    empty = [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}]
    loss = multibox_loss(offsets, scores, empty, priors)
    loss.backward()
    assert float(loss.detach()) == 0
    assert math.isfinite(float(scores.grad.abs().sum()))


def test_detections_suppress_within_a_class() -> None:
    generator = torch.Generator().manual_seed(6)
    priors = priors_of(SSD512, 64)
    offsets = torch.randn(1, len(priors), 4, generator=generator)
    scores = 3 * torch.randn(1, len(priors), 4, generator=generator)
    rule = Suppression(score=0.3, overlap=0.4, before=50, after=12)
    found = detections(offsets, scores, priors, rule)[0]
    boxes, chances = decode(offsets[0], priors).clamp(0, 1), scores[0].softmax(-1)
    expected = []
    for label in (1, 2, 3):
        order = [
            p for p in chances[:, label].argsort(descending=True).tolist()[:50] if chances[p, label] > 0.3
        ]
        kept = nms(boxes[order], chances[order, label], 0.4).tolist()
        expected += [(float(chances[order[k], label]), label) for k in kept]
    expected = sorted(expected, reverse=True)
    assert len(expected) > 12
    pairs = list(zip(found["scores"].tolist(), found["labels"].tolist(), strict=True))
    assert [label for _, label in pairs] == [label for _, label in expected[:12]]
    assert [score for score, _ in pairs] == pytest.approx([score for score, _ in expected[:12]])
