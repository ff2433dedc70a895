"""The task of the accuracy benchmark: a small ResNet on digits that are moved and noisy, trained for so many steps.

Scikit-learn's 1,797 digits are split once, 60 % to train on. Every image is one digit anywhere on a larger canvas
with Gaussian noise over it; training images are drawn anew for every step, test images once. On the plain digits a
narrow network is as good as a wide one; here width tells (`docs/results/accuracy.md` has the figures).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

#: Channels of the three stages, a basic block each: 448 units in 6 groups, 2.1 M multiply-adds.
WIDTHS = (32, 64, 128)
DIGIT = 8  # pixels a side

#: Runs after every backward pass, with the step counted from 1; true: parameters were replaced, no step is taken.
BeforeStep = Callable[[int], bool]


@dataclass(frozen=True)
class Effort:
    """How much a run trains, and on what: epochs, steps an epoch, images a step, their side and noise."""

    dense_epochs: int = 7
    epochs: int = 9
    steps_per_epoch: int = 30
    batch: int = 64
    side: int = 12
    noise: float = 0.2
    test_images: int = 4000
    lr: float = 0.1  # the peak, dense; pruning peaks at two thirds of it, as in smcp-compile
    weight_decay: float = 1e-4

    @property
    def dense_steps(self) -> int:
        """Optimiser steps of the dense network."""
        return self.dense_epochs * self.steps_per_epoch

    @property
    def steps(self) -> int:
        """Optimiser steps of pruning and fine-tuning."""
        return self.epochs * self.steps_per_epoch

    @property
    def pruning_lr(self) -> float:
        """The peak learning rate while pruning."""
        return 2 / 3 * self.lr


class SmallResNet(nn.Module):
    """A ResNet of one basic block a stage; the stem halves the image."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks = []
        for before, width in zip((widths[0], *widths), widths, strict=False):
            stride = 1 if not blocks else 2
            shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            blocks.append(BasicBlock(before, width, stride, shortcut if blocks else None))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, [batch, 10]."""
        features = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(features.mean((2, 3)))


class Task:
    """Images and labels, training, accuracy."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        pixels, labels = load_digits(return_X_y=True)
        self._digits = torch.tensor(pixels, dtype=torch.float32).reshape(-1, DIGIT, DIGIT) / 16
        self._labels = torch.tensor(labels)
        rows = range(len(labels))
        train, test = train_test_split(rows, test_size=0.4, stratify=labels, random_state=0)
        self._train = torch.tensor(train)
        self.test = self._draw(torch.tensor(test), effort.test_images, seed=1_000_003)
        self.example = self.test[0][: effort.batch]

    def _draw(self, rows: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many images of the digits in ``rows``, [count, 1, side, side], and their labels."""
        side, generator = self.effort.side, torch.Generator().manual_seed(seed)
        picked = rows[torch.randint(len(rows), (count,), generator=generator)]
        top, left = torch.randint(side - DIGIT + 1, (2, count), generator=generator)
        span = torch.arange(DIGIT)
        images = torch.zeros(count, side, side)
        place = (
            torch.arange(count)[:, None, None],
            (top[:, None] + span)[:, :, None],
            (left[:, None] + span)[:, None],
        )
        images[place] = self._digits[picked]
        images += self.effort.noise * torch.randn(images.shape, generator=generator)
        return ((images - 0.15) / 0.35)[:, None], self._labels[picked]

    def batches(self, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Training batches, one a step; equal seeds give equal ones."""
        images, labels = self._draw(self._train, steps * self.effort.batch, seed)
        return list(zip(images.split(self.effort.batch), labels.split(self.effort.batch), strict=True))

    def accuracy(self, model: nn.Module) -> float:
        """Share of the test images that the model gets right, in eval mode."""
        training = model.training
        model.eval()
        with torch.no_grad():
            right = (model(self.test[0]).argmax(1) == self.test[1]).double().mean()
        model.train(training)
        return float(right)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy with label smoothing."""
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05)

    def fit(
        self,
        model: nn.Module,
        steps: int,
        lr: float,
        seed: int,
        before_step: BeforeStep | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        """Train by SGD with Nesterov momentum: a linear rise of the learning rate, then a cosine."""
        optimizer = self._optimizer(model, lr)
        model.train()
        for step, batch in enumerate(self.batches(steps, seed), 1):
            for group in optimizer.param_groups:
                group["lr"] = lr * _factor(step - 1, steps)
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            if before_step is not None and before_step(step):
                optimizer = self._optimizer(model, lr)
            else:
                optimizer.step()
            if after_step is not None:
                after_step(step)

    def _optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        decay = self.effort.weight_decay
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=decay, nesterov=True)


def _factor(step: int, steps: int) -> float:
    warm = max(1, round(0.15 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def dense_network(task: Task, seed: int, folder: Path) -> SmallResNet:
    """The network that every method of a seed starts from; trained once, then read from ``folder``."""
    torch.manual_seed(seed)
    model = SmallResNet()
    told = "-".join(str(value) for value in asdict(task.effort).values())
    path = folder / f"dense-{seed}-{told}.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path))
        return model
    task.fit(model, task.effort.dense_steps, task.effort.lr, seed=2 * seed)
    unfinished = path.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, unfinished)
    unfinished.replace(path)
    return model
