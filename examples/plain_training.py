"""Pruning in a plain PyTorch loop: three added lines, marked below.

python examples/plain_training.py
"""

from __future__ import annotations

import torch
from torch import nn
from toy import accuracy, loader, network

import smcp_fx


def main() -> nn.Module:
    """Train and prune to half of the FLOPs; returns the smaller model."""
    torch.manual_seed(0)
    model, batches = network(), loader()
    # --8<-- [start:loop]
    epochs = 4
    schedule = smcp_fx.Schedule.scaled(epochs, steps_per_epoch=len(batches))
    example = next(iter(batches))[0]
    prepared = smcp_fx.prepare(model, example, target=0.5, schedule=schedule)  # 1
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    for _ in range(epochs):
        prepared.train()
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(prepared(images), labels).backward()
            prepared.pruner.step()  # 2: after backward(), before clipping
            optimizer.step()
    smaller = smcp_fx.convert(prepared)  # 3
    # --8<-- [end:loop]
    pruner = prepared.pruner
    print(f"{len(pruner.history)} solves; {pruner.present_cost / pruner.full_cost:.0%} of the FLOPs")
    print(f"accuracy {accuracy(smaller):.1%}")
    print(smaller)
    return smaller


if __name__ == "__main__":
    main()
