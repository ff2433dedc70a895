"""Pages with lines of text, for networks that find text; and how much of it is found.

Lines of `lines.py`, in their colours, on photographs of places of `things.py` or on plain grounds. Calibration and
test have no font and no place in common. Equal seeds give equal pages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from real.lines import Lines
from real.things import Things

SIDE = 320
#: Lines on a page; in pixels, how high they are and how far apart; and how many places are tried for each.
_LINES, _HEIGHT, _APART, _TRIES = (1, 5), (16, 40), 4, 20
#: From which probability there is text, as PP-OCR has it; how much of a line's middle must be found, and of what is
#: found be on lines.
_TEXT, _FOUND, _TRUE = 0.3, 0.5, 0.9
#: From which overlap on two maps of text agree.
_ALIKE = 0.9

#: Left, top, right and bottom of each line, in pixels.
Boxes = list[tuple[int, int, int, int]]


class Pages:
    """The fonts and places of one ``part``, "calibration" or "test", below the folder that `fetch.sh` filled."""

    def __init__(self, folder: Path, part: str) -> None:
        self._lines, self._places = Lines(folder, part), Things(folder, part)

    def draw(self, count: int, seed: int) -> tuple[Tensor, list[Boxes]]:
        """So many pages [count, 3, 320, 320] (blue, green, red; from -1 to 1) and where their lines are."""
        rng, pages, truth = random.Random(seed), torch.empty(count, 3, SIDE, SIDE), list[Boxes]()
        for page in pages:
            image, boxes = self._one(rng)
            pixels = np.array(image, dtype=np.float32) / 127.5 - 1
            page.copy_(torch.from_numpy(pixels).permute(2, 0, 1).flip(0))
            truth.append(boxes)
        return pages, truth

    def _one(self, rng: random.Random) -> tuple[Image.Image, Boxes]:
        if rng.random() < 0.5:
            page = self._places.place(rng, SIDE)
        else:
            grey = rng.randint(60, 255)
            ground = tuple(min(255, max(0, grey + rng.randint(-30, 30))) for _ in range(3))
            page = Image.new("RGB", (SIDE, SIDE), ground)
        boxes: Boxes = []
        for _ in range(rng.randint(*_LINES)):
            _, line = self._lines.image(rng)
            height = min(rng.randint(*_HEIGHT), line.height * SIDE // line.width)
            line = line.resize((line.width * height // line.height, height), Image.Resampling.BICUBIC)
            for _ in range(_TRIES):
                x, y = rng.randint(0, SIDE - line.width), rng.randint(0, SIDE - height)
                if all(y + height + _APART < top or y > bottom + _APART for _, top, _, bottom in boxes):
                    page.paste(line, (x, y))
                    boxes.append((x, y, x + line.width, y + height))
                    break
        return page, boxes


def found(probabilities: Tensor) -> Tensor:
    """Where there is text, [pages, 320, 320], from [pages, 1, 320, 320]."""
    return probabilities[:, 0] > _TEXT


def right(truth: Sequence[Boxes], maps: Tensor) -> list[bool]:
    """Whether every line of a page is found, and nothing else.

    The network marks the middle of lines (shrunk boxes, Liao et al. 2020): more than half of the middle row of each
    line must be marked, and more than nine in ten of the pixels that are must lie on lines.
    """
    return [_every(boxes, marked) and _only(boxes, marked) for boxes, marked in zip(truth, maps, strict=True)]


def _every(boxes: Boxes, marked: Tensor) -> bool:
    rows = [marked[(top + bottom) // 2, left:end] for left, top, end, bottom in boxes]
    return all(float(row.float().mean()) > _FOUND for row in rows)


def _only(boxes: Boxes, marked: Tensor) -> bool:
    on = sum(int(marked[top:bottom, left:end].sum()) for left, top, end, bottom in boxes)
    return on > _TRUE * int(marked.sum())


def agree(wanted: Tensor, maps: Tensor) -> list[bool]:
    """Whether the maps of text overlap nine in ten (intersection over union) with those wanted."""
    both, either = (pixels.flatten(1).sum(1) for pixels in (wanted & maps, wanted | maps))
    return (both >= _ALIKE * either).tolist()
