"""Lines of text in the fonts of seven families, for networks that read; and how much of them is read right.

Four families are for calibration, three for testing. Equal seeds give equal lines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

HEIGHT, WIDTH = 48, 320
_MARGIN = 6


class Lines:
    """The fonts of one ``part``, "calibration" or "test", and words, below the folder that `fetch.sh` filled."""

    def __init__(self, folder: Path, part: str) -> None:
        fonts, rng = folder / "x/usr/share/fonts/truetype", random.Random(3)
        families = sorted(path.name for path in fonts.iterdir())
        rng.shuffle(families)
        mine = families[::2] if part == "calibration" else families[1::2]
        self.fonts = [path for name in mine for path in sorted((fonts / name).rglob("*.ttf"))]
        words = (folder / "x/usr/share/dict/words").read_text(encoding="utf-8").split()
        self._words = [word for word in words if word.isascii() and word.isalpha() and 3 <= len(word) <= 10]

    def draw(self, count: int, seed: int) -> tuple[Tensor, list[str]]:
        """So many images [count, 3, 48, 320] (blue, green, red; from -1 to 1) and their texts."""
        rng, images, texts = random.Random(seed), torch.zeros(count, 3, HEIGHT, WIDTH), list[str]()
        for image in images:
            text, pixels = self._one(rng)
            image[:, :, : pixels.shape[1]] = torch.from_numpy(pixels).permute(2, 0, 1).flip(0)
            texts.append(text)
        return images, texts

    def image(self, rng: random.Random) -> tuple[str, Image.Image]:
        """A line's text and picture, on a ground of its own."""
        while True:
            text = " ".join(
                rng.choice(self._words) if rng.random() < 0.75 else str(rng.randint(0, 99_999))
                for _ in range(rng.randint(2, 3))
            )
            if rng.random() < 0.3:
                text = text.upper()
            font = ImageFont.truetype(str(rng.choice(self.fonts)), rng.randint(26, 36))
            box = font.getbbox(text)
            size = round(box[2] - box[0]) + 2 * _MARGIN, round(box[3] - box[1]) + 2 * _MARGIN
            if size[0] * HEIGHT / size[1] < WIDTH:
                break
        pair = [rng.randint(140, 255), rng.randint(0, 90)]
        if rng.random() < 0.3:
            pair.reverse()
        ground, ink = (
            tuple(min(255, max(0, grey + rng.randint(-30, 30))) for _ in range(3)) for grey in pair
        )
        image = Image.new("RGB", size, ground)
        ImageDraw.Draw(image).text((_MARGIN - box[0], _MARGIN - box[1]), text, font=font, fill=ink)
        image = image.rotate(rng.uniform(-2, 2), fillcolor=ground, resample=Image.Resampling.BICUBIC)
        return text, image.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1)))

    def _one(self, rng: random.Random) -> tuple[str, np.ndarray]:
        text, image = self.image(rng)
        image = image.resize((round(image.width * HEIGHT / image.height), HEIGHT), Image.Resampling.BICUBIC)
        pixels = np.array(image, dtype=np.float32)
        noise = np.random.default_rng(rng.randint(0, 10**9)).normal(0, 8, pixels.shape)
        return text, ((pixels + noise) / 127.5 - 1).astype(np.float32)


def read(characters: Sequence[str], numbers: Tensor) -> list[str]:
    """Return the texts of what was recognised, [lines, steps]: repeats joined, blanks (0) left out."""
    return [
        "".join(
            characters[number]
            for number, last in zip(row, [0, *row[:-1]], strict=True)
            if number and number != last
        )
        for row in numbers.tolist()
    ]


def right(characters: Sequence[str], texts: Sequence[str], numbers: Tensor) -> list[bool]:
    """Whether each whole line is read right, but for spaces."""
    found = read(characters, numbers)
    return [a.replace(" ", "") == b.replace(" ", "") for a, b in zip(texts, found, strict=True)]
