"""Characters on photographs of places, for networks that put a box around each; and how many are found.

Fonts are those of `lines.py`, places those of `things.py`: calibration and test share none. Equal seeds give equal
pages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor, nn

from real.lines import Lines
from real.things import Things

SIDE = 416
_CHARACTERS = "ABCDEFGHKLMNPQRSTUVWXYZ23456789"
#: Characters on a page; in pixels, their size, how far they are apart and how wide the line around them is; the
#: degrees by which they are turned; and how many places are tried for each.
_NUMBER, _SIZE, _APART, _EDGE, _TURN, _TRIES = (1, 3), (50, 96), 8, 5, 30, 20
#: From which probability a box is taken, and from which overlap two boxes are one (as the package has it).
_SURE, _SAME = 0.3, 0.45
#: From which overlap on a box is right, and two networks' boxes agree.
_RIGHT, _ALIKE = 0.5, 0.75
_STRIDES = (8, 16, 32)


class Signs:
    """The fonts and places of one ``part``, "calibration" or "test", below the folder that `fetch.sh` filled."""

    def __init__(self, folder: Path, part: str) -> None:
        self._fonts, self._places = Lines(folder, part).fonts, Things(folder, part)

    def draw(self, count: int, seed: int) -> tuple[Tensor, list[Tensor]]:
        """So many pages [count, 3, 416, 416] (blue, green, red; to 255) and the boxes on each, [n, 4]."""
        rng, pages, truth = random.Random(seed), torch.empty(count, 3, SIDE, SIDE), list[Tensor]()
        for page in pages:
            image, boxes = self._one(rng)
            page.copy_(torch.from_numpy(np.array(image)).permute(2, 0, 1).flip(0))
            truth.append(torch.tensor(boxes, dtype=torch.float32))
        return pages, truth

    def _one(self, rng: random.Random) -> tuple[Image.Image, list[tuple[int, int, int, int]]]:
        page, boxes = self._places.place(rng, SIDE), list[tuple[int, int, int, int]]()
        for _ in range(rng.randint(*_NUMBER)):
            font = ImageFont.truetype(str(rng.choice(self._fonts)), rng.randint(*_SIZE))
            ink = tuple(rng.randint(170, 255) - 170 * (rng.random() < 0.5) for _ in range(3))
            shape = Image.new("L", (2 * _SIZE[1], 2 * _SIZE[1]))
            middle = (_SIZE[1], _SIZE[1])
            ImageDraw.Draw(shape).text(middle, rng.choice(_CHARACTERS), font=font, fill=255, anchor="mm")
            shape = shape.rotate(rng.uniform(-_TURN, _TURN), resample=Image.Resampling.BICUBIC)
            shape = shape.crop(shape.getbbox())
            for _ in range(_TRIES):
                x, y = rng.randint(0, SIDE - shape.width), rng.randint(0, SIDE - shape.height)
                box = x, y, x + shape.width, y + shape.height
                if all(
                    box[2] + _APART < left or x > end + _APART or box[3] + _APART < top or y > bottom + _APART
                    for left, top, end, bottom in boxes
                ):
                    edge = tuple(255 - value for value in ink)
                    page.paste(edge, (x, y), shape.filter(ImageFilter.MaxFilter(_EDGE)))
                    page.paste(ink, (x, y), shape)
                    boxes.append(box)
                    break
        return page, boxes


class Parts(nn.Module):
    """A detector of YOLOX's kind, what it returns [b, n, 4 + 1 + 1] taken apart: offsets and how sure it is."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, pages: Tensor) -> dict[str, Tensor]:
        """``boxes`` [b, n, 4], as offsets; ``sure`` [b, n], probabilities."""
        out = self.detector(pages)
        return {"boxes": out[..., :4], "sure": out[..., 4] * out[..., 5]}


def found(outputs: dict[str, Tensor]) -> list[Tensor]:
    """The boxes found on each page, [n, 4], in pixels (YOLOX, Ge et al. 2021)."""
    grid = []
    for stride in _STRIDES:
        y, x = torch.meshgrid(*[torch.arange(SIDE // stride)] * 2, indexing="ij")
        grid.append(torch.stack([x.flatten(), y.flatten(), torch.full((x.numel(),), stride)], 1))
    cells = torch.cat(grid)
    middle = (outputs["boxes"][..., :2] + cells[:, :2]) * cells[:, 2:]
    half = outputs["boxes"][..., 2:].exp() * cells[:, 2:] / 2
    pages = []
    for boxes, sure in zip(torch.cat([middle - half, middle + half], -1), outputs["sure"], strict=True):
        kept = sure > _SURE
        best = torchvision.ops.nms(boxes[kept], sure[kept], _SAME)
        pages.append(boxes[kept][best])
    return pages


def right(truth: Sequence[Tensor], pages: Sequence[Tensor], overlap: float = _RIGHT) -> list[bool]:
    """Whether every character of a page has a box, and every box a character."""
    answers = []
    for wanted, boxes in zip(truth, pages, strict=True):
        near = torchvision.ops.box_iou(wanted, boxes) >= overlap
        answers.append(bool(near.any(0).all()) and bool(near.any(1).all()))
    return answers


def agree(wanted: Sequence[Tensor], pages: Sequence[Tensor]) -> list[bool]:
    """Whether each page's boxes are those wanted, to three quarters of an overlap."""
    return right(wanted, pages, _ALIKE)
