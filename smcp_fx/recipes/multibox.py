"""The training loss of SSD (Liu et al., section 2.2): smooth L1 for offsets, cross entropy for classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from smcp_fx.zoo.boxes import match

#: Background priors that count per prior with an object: the worst classified (Liu et al., section 2.2).
NEGATIVES = 3


def multibox_loss(
    offsets: Tensor, scores: Tensor, targets: Sequence[dict[str, Tensor]], priors: Tensor
) -> Tensor:
    """Return the loss of a batch, divided by the number of priors that hold an object.

    Offsets [N, priors, 4], class scores [N, priors, classes] with class 0 background, an image's true ``boxes`` [n,
    4] (corners) and ``labels`` [n] in each target, priors [priors, 4] (centres). The loss of a batch without objects
    is 0.
    """
    pairs = [match(target["boxes"], target["labels"], priors) for target in targets]
    wanted, labels = (torch.stack(part) for part in zip(*pairs, strict=True))
    held = labels > 0
    held_by_image = held.sum(1, keepdim=True)
    of_offsets = F.smooth_l1_loss(offsets.float()[held], wanted[held], reduction="sum")
    of_classes = F.cross_entropy(scores.float().transpose(1, 2), labels, reduction="none")
    with torch.no_grad():
        wrong = of_classes.masked_fill(held, -torch.inf)
        place = wrong.argsort(dim=1, descending=True, stable=True).argsort(1)
        mined = (place < NEGATIVES * held_by_image) & ~held
    total = of_offsets + of_classes[held | mined].sum()
    return total / held_by_image.sum().clamp(min=1)
