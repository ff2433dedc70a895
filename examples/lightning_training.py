"""Pruning in PyTorch Lightning: the module holds a prepared model, and one callback does the rest.

python examples/lightning_training.py
"""

from __future__ import annotations

import lightning
import torch
from torch import nn
from toy import accuracy, loader, network

import smcp_fx
from smcp_fx.integrations.lightning import PruningCallback


# --8<-- [start:module]
class Classifier(lightning.LightningModule):
    """A classifier that is pruned to half of its FLOPs."""

    def __init__(self, model: nn.Module, example: torch.Tensor, schedule: smcp_fx.Schedule) -> None:
        super().__init__()
        self.model = smcp_fx.prepare(model, example, target=0.5, schedule=schedule)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser, on the prepared model's parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# --8<-- [end:module]


def main() -> nn.Module:
    """Train and prune; returns the smaller model."""
    torch.manual_seed(0)
    model, batches = network(), loader()
    # --8<-- [start:fit]
    epochs = 4
    schedule = smcp_fx.Schedule.scaled(epochs, steps_per_epoch=len(batches))
    classifier = Classifier(model, next(iter(batches))[0], schedule)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[PruningCallback()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(classifier, batches)
    smaller = smcp_fx.convert(classifier.model)
    # --8<-- [end:fit]
    print(f"accuracy {accuracy(smaller):.1%}")
    return smaller


if __name__ == "__main__":
    main()
