"""Pruning with Hugging Face Accelerate: the usual loop and three added lines, marked below.

accelerate launch examples/accelerate_training.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import smcp_fx

EPOCHS, BATCH, ACCUMULATED = 4, 16, 2


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip


def data() -> TensorDataset:
    """Noise with a bright patch in the left half or in the right."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(256, 1, 12, 12, generator=generator)
    labels = torch.randint(2, (256,), generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[0, 4:8, 6 * int(label) : 6 * int(label) + 4] += 2
    return TensorDataset(images, labels)


# --8<-- [start:train]
def train(accelerator: Accelerator) -> tuple[smcp_fx.PreparedModel, nn.Module]:
    """Train and prune to half of the FLOPs; returns the prepared and the smaller model."""
    loader = DataLoader(data(), BATCH, shuffle=True)
    steps = len(loader) // ACCUMULATED // accelerator.num_processes
    schedule = smcp_fx.Schedule.scaled(EPOCHS, steps)
    image = torch.randn(2, 1, 12, 12)
    prepared = smcp_fx.prepare(network(), image, target=0.5, schedule=schedule)  # 1
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(prepared, optimizer, loader)
    for _ in range(EPOCHS):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # before the optimiser's step
                    prepared.pruner.step(accelerator.scaler)  # 2
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return prepared, smcp_fx.convert(accelerator.unwrap_model(prepared))  # 3


# --8<-- [end:train]
if __name__ == "__main__":
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    prepared, smaller = train(accelerator)
    pruner = prepared.pruner
    accelerator.print(
        f"{len(pruner.history)} solves; {pruner.history[-1].cost / pruner.full_cost:.0%} of the FLOPs"
    )
    accelerator.print(smaller)
