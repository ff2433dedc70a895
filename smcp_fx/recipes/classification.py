"""Classification: ImageNet's task, with its data, loss and accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from smcp_fx.recipes.recipe import Recipe
from smcp_fx.recipes.task import Meter, torchmetrics
from smcp_fx.zoo.image_folder import image_folder
from smcp_fx.zoo.pretrained import Preprocessing


class Classification:
    """ImageNet's task on any folder with train/ and val/, which hold one folder per class."""

    def __init__(self, recipe: Recipe, data: Path) -> None:
        self.train, self.test, self.classes = image_folder(data, Preprocessing(recipe.size))
        self._smoothing = recipe.training.label_smoothing

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Stack images and labels."""
        images, labels = default_collate(list(samples))
        return images, labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy, with the recipe's label smoothing."""
        return F.cross_entropy(outputs.float(), targets, label_smoothing=self._smoothing)

    def meter(self, device: torch.device) -> Meter:
        """Return a meter of top-1 accuracy, and of top-5 if there are more than five classes."""
        return _Accuracy(self.classes, device)


class _Accuracy:
    def __init__(self, classes: int, device: torch.device) -> None:
        accuracy = torchmetrics().classification.MulticlassAccuracy
        self._metrics = {
            f"top{k}": accuracy(num_classes=classes, top_k=k, average="micro").to(device)
            for k in (1, 5)
            if k == 1 or classes > k
        }

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for metric in self._metrics.values():
            metric.update(outputs.float(), targets)

    def compute(self) -> dict[str, float]:
        return {name: 100 * float(metric.compute()) for name, metric in self._metrics.items()}
