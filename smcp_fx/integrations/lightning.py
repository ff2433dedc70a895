"""Pruning in PyTorch Lightning.

    trainer = lightning.Trainer(callbacks=[PruningCallback()], ...)

The Lightning module holds a prepared model, ``self.model = smcp_fx.prepare(...)``, and calls it like the
original; `configure_optimizers` builds the optimiser on ``self.parameters()``.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:  # the older distribution of the same package
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    except ImportError as error:
        raise ImportError(
            f"smcp_fx.integrations.lightning needs PyTorch Lightning ({error}): pip install lightning"
        ) from error

from smcp_fx.errors import TrainingError
from smcp_fx.prepared import PreparedModel
from smcp_fx.pruning.loop_watch import TrainingWarning
from smcp_fx.pruning.pruner import Pruner
from smcp_fx.pruning.solve import Solve


class PruningCallback(Callback):
    """Calls the pruner before each optimiser step, logs its solves, and keeps its history in checkpoints.

    Works with gradient accumulation and clipping, every precision and DDP; gradients are unscaled before.
    With several optimisers, the one that holds most of the prepared parameters counts. A solve's metrics go
    to the trainer's loggers under ``prefix``; target and cost also go to the progress bar.
    """

    def __init__(self, prefix: str = "pruning") -> None:
        self.prefix = prefix
        self._pruner: Pruner | None = None
        self._optimizer: Any = None
        self._history: list[Solve] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the prepared model, and compare its schedule with the length of the training."""
        prepared = [module for module in pl_module.modules() if isinstance(module, PreparedModel)]
        if len(prepared) != 1:
            raise TrainingError(
                f"PruningCallback needs one prepared model in {type(pl_module).__name__}, which holds "
                f"{len(prepared)}: set self.model = smcp_fx.prepare(model, ...) in its __init__"
            )
        self._pruner = prepared[0].pruner
        if self._history:
            self._pruner.history = self._history
        self._own = {id(parameter) for parameter in prepared[0].parameters()}
        schedule, steps = self._pruner.schedule, trainer.estimated_stepping_batches
        if schedule is not None and steps < schedule.last_step:
            warnings.warn(
                f"the pruning schedule solves for the last masks at step {schedule.last_step}, and the trainer "
                f"makes {steps:.0f} optimiser steps: give prepare a schedule of this length, such as "
                f"Schedule.scaled(epochs, steps_per_epoch)",
                TrainingWarning,
                stacklevel=2,
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimiser that holds the prepared parameters; raise `TrainingError` if there is none."""
        held = [self._held(optimizer) for optimizer in trainer.optimizers]
        self._optimizer = trainer.optimizers[held.index(max(held))] if any(held) else None
        if self._optimizer is None:
            raise TrainingError(
                "no optimiser holds a parameter of the prepared model: prepare copies the model, so build the "
                "optimiser in configure_optimizers on self.parameters() after self.model = smcp_fx.prepare(...)"
            )

    def _held(self, optimizer: Any) -> int:
        """Return the number of elements of the prepared model's parameters in an optimiser."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        return sum(p.numel() for p in held if id(p) in self._own)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Gather importances, and solve when a solve is due."""
        if self._pruner is None or optimizer is not self._optimizer:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        solve = self._pruner.step(scaler)
        if solve is not None:
            metrics = {f"{self.prefix}/{name}": value for name, value in solve.metrics().items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
            shown = {f"{self.prefix}_{name}": getattr(solve, name) for name in ("target", "cost")}
            pl_module.log_dict(shown, prog_bar=True, logger=False, on_step=True, rank_zero_only=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON for Lightning's checkpoints; the model's state dict holds the rest."""
        history = self._history if self._pruner is None else self._pruner.history
        return {"history": json.dumps([asdict(solve) for solve in history])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history from `state_dict`."""
        self._history = [Solve(**entry) for entry in json.loads(state_dict["history"])]
