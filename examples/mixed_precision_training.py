"""Pruning with mixed precision: fp16 with a gradient scaler on a GPU, bf16 on a CPU.

python examples/mixed_precision_training.py
"""

from __future__ import annotations

import torch
from torch import nn
from toy import accuracy, loader, network

import smcp_fx


def main() -> nn.Module:
    """Train and prune to half of the FLOPs; returns the smaller model."""
    torch.manual_seed(0)
    model, batches, epochs = network(), loader(), 4
    schedule = smcp_fx.Schedule.scaled(epochs, steps_per_epoch=len(batches))
    prepared = smcp_fx.prepare(model, next(iter(batches))[0], target=0.5, schedule=schedule)
    # --8<-- [start:loop]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prepared.to(device)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    half = torch.float16 if device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device, enabled=half == torch.float16)
    for _ in range(epochs):
        prepared.train()
        for images, labels in batches:
            optimizer.zero_grad()
            with torch.autocast(device, half):
                loss = nn.functional.cross_entropy(prepared(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            prepared.pruner.step(scaler)  # before or after scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    # --8<-- [end:loop]
    smaller = smcp_fx.convert(prepared).cpu()
    print(f"accuracy {accuracy(smaller):.1%}")
    return smaller


if __name__ == "__main__":
    main()
