"""Pruning a model of transformers in its own Trainer: one callback calls the pruner.

pip install transformers accelerate
python examples/transformers_training.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import smcp_fx

EPOCHS, BATCH = 4, 16


# --8<-- [start:callback]
class Pruning(TrainerCallback):
    """Shows the pruner the gradients of each step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        """Gather importances, and solve when it is time; the gradients are unscaled by now."""
        model.pruner.step()


# --8<-- [end:callback]


def images(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Noise, brighter in the left or the right half."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        pixels = torch.randn(3, 32, 32, generator=draw)
        pixels[:, :, 16 * (index % 2) :][:, :, :16] += 2
        found.append({"pixel_values": pixels, "labels": torch.tensor(index % 2)})
    return found


def main(folder: Path | str | None = None) -> nn.Module:
    """Train and prune; returns the smaller model."""
    torch.manual_seed(0)
    data, folder = images(), Path(folder or tempfile.mkdtemp())
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                       image_size=32, patch_size=8, num_labels=2)  # fmt: skip
    model = ViTForImageClassification(config)
    # --8<-- [start:train]
    example = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    schedule = smcp_fx.Schedule.scaled(EPOCHS, len(data) // BATCH)
    prepared = smcp_fx.prepare(model, example, target=0.5, schedule=schedule)
    arguments = TrainingArguments(str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
                                  learning_rate=3e-3, save_strategy="no", report_to="none", use_cpu=True)  # fmt: skip
    Trainer(prepared, arguments, train_dataset=data, callbacks=[Pruning()]).train()
    smaller = smcp_fx.convert(prepared.eval())
    smcp_fx.save(smaller, folder / "model.safetensors")  # beside what config.save_pretrained(folder) writes
    # --8<-- [end:train]
    with torch.no_grad():
        logits = smaller(
            torch.stack([x["pixel_values"] for x in data]), torch.zeros(len(data), dtype=int)
        ).logits
    right = logits.argmax(1) == torch.stack([x["labels"] for x in data])
    print(f"accuracy {right.float().mean():.1%}")
    return smaller


if __name__ == "__main__":
    main()
