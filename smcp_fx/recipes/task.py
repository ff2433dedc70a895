"""A task: its data, its loss, and the measure of a network's quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from smcp_fx.errors import InputError


class Meter(Protocol):
    """Gathers outputs over a test set (on all ranks) and scores them."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        ...

    def compute(self) -> dict[str, float]:
        """Return percentages by name, the main one first."""
        ...


class Task(Protocol):
    """The number of ``classes``, the data sets, the loss, and a `Meter`."""

    classes: int
    train: Dataset[Any]
    test: Dataset[Any]

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return a batch: images [N, 3, size, size], and targets as `loss` takes them."""
        ...

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the training loss of the network's outputs."""
        ...

    def meter(self, device: torch.device) -> Meter:
        """Return a fresh meter."""
        ...


def torchmetrics() -> Any:
    """Return the package, or raise an `InputError` that says how to install it."""
    try:
        import torchmetrics as package
    except ModuleNotFoundError as error:
        raise InputError(f"evaluating needs {error.name}: pip install torchmetrics pycocotools") from error
    return package
