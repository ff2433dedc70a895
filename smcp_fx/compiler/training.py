"""The training loops of the command line: plain PyTorch, checkpointed every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from smcp_fx.checkpoint import load_checkpoint, save_checkpoint
from smcp_fx.errors import TrainingError
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel

#: Called after every optimiser step with (steps done, steps in all, loss).
Ticker = Callable[[int, int, float], None]


@dataclass(frozen=True)
class EpochResult:
    """What an epoch came to."""

    epoch: int
    loss: float
    accuracy: float


class Trainer:
    """SGD with Nesterov momentum and a one-cycle learning rate, resumable after every epoch.

    ``before_step(step)`` runs between ``backward`` and the optimiser's step (the pruner's place).
    """

    def __init__(
        self,
        model: nn.Module,
        fitted: FittedModel,
        data: ImageData,
        *,
        epochs: float,
        batch: int,
        lr: float,
        weight_decay: float,
        seed: int,
        checkpoint: Path,
    ) -> None:
        self.model = model
        self.fitted = fitted
        self.data = data
        self.batch = batch
        self.seed = seed
        self.checkpoint = checkpoint
        self.steps_per_epoch = data.steps_per_epoch(batch)
        self.total_steps = max(1, round(epochs * self.steps_per_epoch))
        self.step = 0
        self.results: list[EpochResult] = []
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.SGD(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=lr,
            momentum=0.9,
            nesterov=True,
        )
        self.lr = lr

    def run(self, tick: Ticker, before_step: Callable[[int], None] | None = None) -> None:
        """Train to the end from wherever the trainer stands, a checkpoint an epoch."""
        while self.step < self.total_steps:
            epoch = self.step // self.steps_per_epoch
            losses = 0.0
            done = 0
            self.model.train()
            torch.manual_seed(self.seed * 100_003 + epoch)
            batches = self.data.epoch(
                self.batch, self.seed * 100_003 + epoch, self.fitted.channels, self.fitted.size
            )
            for images, labels in batches:
                if self.step >= self.total_steps:
                    break
                self._set_lr()
                loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.05)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                value = float(loss.detach())
                if not math.isfinite(value):
                    saved = (
                        f"; the last good state is in {self.checkpoint}" if self.checkpoint.exists() else ""
                    )
                    raise TrainingError(
                        f"the loss is {value} at step {self.step + 1} of {self.total_steps} (epoch {epoch + 1}): "
                        f"training has diverged. Try a smaller learning rate than {self.lr} (--lr){saved}."
                    )
                self.step += 1
                if before_step is not None:
                    before_step(self.step)
                self.optimizer.step()
                losses += value
                done += 1
                tick(self.step, self.total_steps, value)
            accuracy = self.evaluate()
            self.results.append(EpochResult(epoch + 1, losses / max(done, 1), accuracy))
            self.save()

    def evaluate(self) -> float:
        """Share of the test images that the model gets right, in eval mode."""
        self.model.eval()
        right = total = 0
        with torch.no_grad():
            for images, labels in self.data.tests(256, self.fitted.channels, self.fitted.size):
                right += int((self.model(images).argmax(1) == labels).sum())
                total += labels.numel()
        self.model.train()
        return right / total

    def _set_lr(self) -> None:
        warm = max(1, round(0.15 * self.total_steps))
        if self.step < warm:
            factor = (self.step + 1) / warm
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (self.step - warm) / max(1, self.total_steps - warm)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor

    def save(self) -> None:
        """Write the checkpoint; it is complete or not there."""
        results = [[r.epoch, r.loss, r.accuracy] for r in self.results]
        save_checkpoint(
            self.checkpoint, self.model, self.optimizer, extras={"step": self.step, "results": results}
        )

    def load(self) -> bool:
        """Go back to the checkpoint; False when there is none."""
        if not self.checkpoint.exists():
            return False
        extras = load_checkpoint(self.checkpoint, self.model, self.optimizer)
        self.step = int(extras["step"])
        self.results = [EpochResult(int(e), float(lo), float(a)) for e, lo, a in extras["results"]]
        return True
