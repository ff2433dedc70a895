"""Prior boxes, their matching with true boxes, and offsets between the two (Liu et al., SSD, section 2.2).

Boxes are corners (x0, y0, x1, y1) or centres (x, y, width, height), in shares of the image's sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import batched_nms, box_convert, box_iou

#: The scales of centre offsets and of logarithms of sides, as in Liu et al.'s code.
_VARIANCES = (0.1, 0.1, 0.2, 0.2)


def prior_boxes(sides: Sequence[int], scales: Sequence[float], ratios: Sequence[Sequence[int]]) -> Tensor:
    """Return the prior boxes [priors, 4] as centres, by feature map, row, column, and shape.

    A map of ``sides[k]`` positions a side has at each: squares of side ``scales[k]`` and of the geometric mean of
    it and the next scale, and for every ratio r in ``ratios[k]`` boxes of r : 1 and 1 : r of the first one's area.
    """
    boxes = []
    for side, scale, following, shapes in zip(sides, scales[:-1], scales[1:], ratios, strict=True):
        sizes = [(scale, scale), (math.sqrt(scale * following),) * 2]
        for ratio in shapes:
            root = math.sqrt(ratio)
            sizes += [(scale * root, scale / root), (scale / root, scale * root)]
        at = (torch.arange(side, dtype=torch.float64) + 0.5) / side
        rows, columns = torch.meshgrid(at, at, indexing="ij")
        centres = torch.stack([columns, rows], -1).reshape(-1, 1, 2).expand(-1, len(sizes), 2)
        shape = torch.tensor(sizes, dtype=torch.float64).expand(side * side, -1, 2)
        boxes.append(torch.cat([centres, shape], -1).reshape(-1, 4))
    return torch.cat(boxes).float()


def encode(corners: Tensor, priors: Tensor) -> Tensor:
    """Return offsets [..., 4] of boxes (corners) from priors (centres), divided by the variances."""
    boxes: Tensor = box_convert(corners, "xyxy", "cxcywh")
    centres = (boxes[..., :2] - priors[..., :2]) / priors[..., 2:]
    sides = (boxes[..., 2:] / priors[..., 2:]).log()
    offsets: Tensor = torch.cat([centres, sides], -1) / boxes.new_tensor(_VARIANCES)
    return offsets


def decode(offsets: Tensor, priors: Tensor) -> Tensor:
    """Return boxes as corners [..., 4] from offsets and priors (centres): the inverse of `encode`."""
    scaled = offsets * offsets.new_tensor(_VARIANCES)
    centres = scaled[..., :2] * priors[..., 2:] + priors[..., :2]
    sides = scaled[..., 2:].exp() * priors[..., 2:]
    corners: Tensor = box_convert(torch.cat([centres, sides], -1), "cxcywh", "xyxy")
    return corners


def match(boxes: Tensor, labels: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    """Give every prior a box and a label: offsets [priors, 4] and labels [priors], 0 for background.

    ``boxes`` [n, 4] are corners, ``labels`` [n] count from 1. A prior takes the box that it overlaps most, if
    their intersection over union is at least one half. Each box also takes the prior that overlaps it most.
    """
    if not len(boxes):
        return torch.zeros_like(priors), labels.new_zeros(len(priors))
    overlaps = box_iou(boxes, box_convert(priors, "cxcywh", "xyxy"))
    best, owner = overlaps.max(0)
    own = overlaps.argmax(1)
    order = torch.arange(len(boxes), device=boxes.device)
    owner[own] = order
    best[own] = 2.0
    chosen = torch.where(best >= 0.5, labels[owner], torch.zeros_like(labels[owner]))
    return encode(boxes[owner], priors), chosen


@dataclass(frozen=True)
class Suppression:
    """The rule for keeping detections: Liu et al., section 3.1."""

    score: float = 0.01
    overlap: float = 0.45
    before: int = 400
    after: int = 200


@torch.no_grad()
def detections(
    offsets: Tensor, scores: Tensor, priors: Tensor, suppression: Suppression | None = None
) -> list[dict[str, Tensor]]:
    """Turn a batch's outputs into boxes (corners, shares of the image), labels from 1, and scores, image by image.

    Offsets [N, priors, 4] and class scores [N, priors, classes] before the softmax. The ``before`` best of
    each class above ``score`` go into non-maximum suppression; the ``after`` best of all classes remain.
    """
    rule = suppression or Suppression()
    per_image = []
    for image, logits in zip(offsets.float(), scores.float(), strict=True):
        boxes = decode(image, priors).clamp(0, 1)
        chances = logits.softmax(-1)[:, 1:]
        best, places = chances.topk(min(rule.before, len(chances)), 0)
        label = torch.arange(1, chances.shape[1] + 1, device=logits.device).expand_as(places)
        strong = best > rule.score
        score, place, label = best[strong], places[strong], label[strong]
        kept = batched_nms(boxes[place], score, label, rule.overlap)[: rule.after]
        per_image.append({"boxes": boxes[place[kept]], "labels": label[kept], "scores": score[kept]})
    return per_image
