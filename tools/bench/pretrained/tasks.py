"""Data sets, small enough for a CPU and hard enough that width tells.

- `Glyphs`: letters and digits in typefaces never seen in training, in 47 classes (EMNIST's balanced merging of
  cases), coloured, distorted, on uneven noisy grounds. From the file that `render.py` makes of a folder of fonts.
- `Digits`: scikit-learn's handwritten digits, anywhere on a larger canvas under noise.
- `Folder`: any images in a folder a class, cropped and mirrored at random.

Training images are drawn anew for every step, test images once; equal seeds give equal images.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from pretrained.render import CHARACTERS

#: Lower case letters that look like their upper case.
_ALIKE = "cijklmopsuvwxyz"
_TEST_SEED, _TEST_IMAGES = 1_234_567, 4_000


class Task(ABC):
    """Images [count, channels, side, side] with labels [count], to train on and to test on."""

    name: str
    channels: int
    side: int
    classes: int
    #: Optimiser steps of 64 images after which a network has learnt what it can.
    steps: int
    test: tuple[Tensor, Tensor]

    @abstractmethod
    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many training images and their labels."""

    @property
    def example(self) -> Tensor:
        """Two images, to trace a network with."""
        return self.test[0][:2]

    def accuracy(self, model: nn.Module) -> float:
        """Share of the test images that the model gets right, in eval mode."""
        return accuracy_on(self.test, model)


def accuracy_on(images_and_labels: tuple[Tensor, Tensor], model: nn.Module) -> float:
    """Share of these images that the model gets right, in eval mode."""
    images, labels = images_and_labels
    training = model.training
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(some).argmax(1) for some in images.split(500)]) == labels
    model.train(training)
    return float(right.double().mean())


class Glyphs(Task):
    """Letters and digits; a quarter of the typeface families is for testing only."""

    name, channels, side, classes, steps = "glyphs", 3, 20, 47, 4_000

    def __init__(self, file: Path) -> None:
        data = np.load(file)
        masks, families = torch.from_numpy(data["masks"]), data["families"]
        inner = F.interpolate(masks.flatten(0, 1)[:, None].float(), size=self.side - 4, mode="area")
        self._shapes = F.pad(inner.round().to(torch.uint8), (2, 2, 2, 2))
        like = [CHARACTERS.index(c.upper() if c in _ALIKE else c) for c in CHARACTERS]
        self._labels = torch.tensor([sorted(set(like)).index(i) for i in like]).repeat(len(families))
        names = np.random.default_rng(0).permutation(sorted(set(families)))
        unseen = np.isin(families, names[: len(names) // 4])
        held_out = torch.from_numpy(unseen).repeat_interleave(len(CHARACTERS))
        self._train = torch.nonzero(~held_out)[:, 0]
        self.test = self._draw(torch.nonzero(held_out)[:, 0], _TEST_IMAGES, _TEST_SEED)

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many training images and their labels."""
        return self._draw(self._train, count, seed)

    def _draw(self, rows: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)

        def uniform(*shape: int, low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(shape, generator=g)

        picked = rows[torch.randint(len(rows), (count,), generator=g)]
        size, angle = uniform(count, low=0.8, high=1.3), uniform(count, low=-0.25, high=0.25)
        shear = uniform(count, low=-0.3, high=0.3)
        place = torch.zeros(count, 2, 3)
        place[:, 0, 0], place[:, 0, 1] = size * torch.cos(angle), shear - size * torch.sin(angle)
        place[:, 1, 0], place[:, 1, 1] = size * torch.sin(angle), size * torch.cos(angle)
        place[:, :, 2] = uniform(count, 2, low=-0.2, high=0.2)
        shapes = self._shapes[picked].float() / 255
        grid = F.affine_grid(place, list(shapes.shape), align_corners=False)
        shapes = F.grid_sample(shapes, grid, align_corners=False)
        # A colour against its ground: one contrast for all three, lighter or darker, and a hue on top.
        contrast = uniform(count, 1, 1, 1, low=0.3, high=1.0) * (
            1 - 2.0 * (uniform(count, 1, 1, 1, low=0, high=1) < 0.5)
        )
        colour = contrast + uniform(count, 3, 1, 1, low=-0.3, high=0.3)
        ground = F.interpolate(
            0.3 * torch.randn(count, 3, 5, 5, generator=g),
            size=self.side,
            mode="bilinear",
            align_corners=False,
        )
        noise = 0.25 * torch.randn(count, 3, self.side, self.side, generator=g)
        return shapes * colour + ground + noise, self._labels[picked]


class Digits(Task):
    """Handwritten digits, 40% of them for testing only."""

    name, channels, side, classes, steps = "digits", 1, 16, 10, 1_000
    _digit, _noise = 8, 0.3

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self._digits = torch.tensor(pixels, dtype=torch.float32).reshape(-1, self._digit, self._digit) / 16
        self._labels = torch.tensor(labels)
        train, test = train_test_split(range(len(labels)), test_size=0.4, stratify=labels, random_state=0)
        self._train = torch.tensor(train)
        self.test = self._draw(torch.tensor(test), _TEST_IMAGES, _TEST_SEED)

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many training images and their labels."""
        return self._draw(self._train, count, seed)

    def _draw(self, rows: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        picked = rows[torch.randint(len(rows), (count,), generator=g)]
        top, left = torch.randint(self.side - self._digit + 1, (2, count), generator=g)
        span, images = torch.arange(self._digit), torch.zeros(count, self.side, self.side)
        images[
            torch.arange(count)[:, None, None],
            (top[:, None] + span)[:, :, None],
            (left[:, None] + span)[:, None],
        ] = self._digits[picked]
        images += self._noise * torch.randn(images.shape, generator=g)
        return images[:, None] / 0.5, self._labels[picked]


class Folder(Task):
    """Images of a folder with one folder a class; a quarter of each class is for testing only."""

    name, channels, side, steps = "folder", 3, 32, 4_000
    _margin = 4

    def __init__(self, folder: Path) -> None:
        found = ImageFolder(str(folder), _scaled(self.side + self._margin))
        self.classes = len(found.classes)
        self._images = torch.stack([image for image, _ in found])
        self._labels = torch.tensor(found.targets)
        train, test = train_test_split(
            range(len(found)), test_size=0.25, stratify=found.targets, random_state=0
        )
        self._train, inner = torch.tensor(train), slice(self._margin // 2, self._margin // 2 + self.side)
        self.test = self._images[test][..., inner, inner], self._labels[test]

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many training images and their labels."""
        g = torch.Generator().manual_seed(seed)
        picked = self._train[torch.randint(len(self._train), (count,), generator=g)]
        corners = torch.randint(self._margin + 1, (count, 2), generator=g).tolist()
        images = torch.stack(
            [
                self._images[i, :, y : y + self.side, x : x + self.side]
                for i, (y, x) in zip(picked, corners, strict=True)
            ]
        )
        mirrored = torch.rand(count, 1, 1, 1, generator=g) < 0.5
        return torch.where(mirrored, images.flip(3), images), self._labels[picked]


def _scaled(side: int) -> Callable[[Any], Tensor]:
    """A square of so many pixels from the middle of an image, normalised."""
    steps = [v2.PILToTensor(), v2.Resize(side), v2.CenterCrop(side), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*steps, v2.Normalize([0.5] * 3, [0.25] * 3)])


def cosine(step: int, steps: int) -> float:
    """Share of the peak learning rate: a linear rise over a tenth of the steps, then a cosine; steps from 0."""
    warm = max(1, round(0.1 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
