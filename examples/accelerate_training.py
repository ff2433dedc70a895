"""Pruning with Hugging Face Accelerate: the usual loop and three added lines, marked below.

accelerate launch examples/accelerate_training.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from toy import accuracy, loader, network

import smcp_fx


def main(accelerator: Accelerator) -> tuple[smcp_fx.PreparedModel, nn.Module]:
    """Train and prune to half of the FLOPs; returns the prepared and the smaller model."""
    model, batches = network(), loader()
    # --8<-- [start:loop]
    epochs, accumulated = 4, accelerator.gradient_accumulation_steps
    steps = len(batches) // accumulated // accelerator.num_processes
    schedule = smcp_fx.Schedule.scaled(epochs, steps)
    example = next(iter(batches))[0]
    prepared = smcp_fx.prepare(model, example, target=0.5, schedule=schedule)  # 1
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    wrapped, optimizer, batches = accelerator.prepare(prepared, optimizer, batches)
    for _ in range(epochs):
        wrapped.train()
        for images, labels in batches:
            with accelerator.accumulate(wrapped):
                loss = nn.functional.cross_entropy(wrapped(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # before the optimiser's step
                    prepared.pruner.step(accelerator.scaler)  # 2
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    smaller = smcp_fx.convert(accelerator.unwrap_model(prepared))  # 3
    # --8<-- [end:loop]
    accelerator.print(f"accuracy {accuracy(smaller):.1%}")
    return prepared, smaller


if __name__ == "__main__":
    main(Accelerator(gradient_accumulation_steps=2))
