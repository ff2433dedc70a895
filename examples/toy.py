"""What the examples share: a small network, and images that it can tell apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network() -> nn.Module:
    """A small convolutional network of two classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip


def data() -> TensorDataset:
    """256 images of noise with a bright patch in the left half (class 0) or in the right (1)."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(256, 1, 12, 12, generator=generator)
    labels = torch.randint(2, (256,), generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[0, 4:8, 6 * int(label) : 6 * int(label) + 4] += 2
    return TensorDataset(images, labels)


def loader(batch: int = 16) -> DataLoader[tuple[torch.Tensor, ...]]:
    """The images in shuffled batches."""
    return DataLoader(data(), batch, shuffle=True)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the images that a model gets right."""
    images, labels = data().tensors
    return float((model.eval()(images).float().argmax(1) == labels).float().mean())


def train(model: nn.Module, epochs: int) -> nn.Module:
    """Train without pruning; returns the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(epochs):
        for images, labels in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model
