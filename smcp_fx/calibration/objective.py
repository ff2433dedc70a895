"""What is differentiated to tell what channels are worth: a loss of the outputs of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smcp_fx.calibration.batches import Batch
from smcp_fx.errors import InputError, SmcpError
from smcp_fx.tracing.example_runs import first_line

Loss = Callable[[Any, Any], Tensor]


class Objective:
    """The loss of a network's outputs: the user's, or cross entropy of labels that are given or drawn."""

    def __init__(self, loss: Loss | None = None) -> None:
        self._loss = loss

    def draws(self, batch: Batch) -> bool:
        """Whether labels are drawn for this batch from what a network predicts."""
        return self._loss is None and batch.labels is None

    def drawn(self, outputs: Any, batch: Batch) -> Any:
        """Return labels that are drawn by the scores that a model gives its classes, [images, ...]."""
        scores = outputs.detach().float().movedim(1, -1)
        if not bool(torch.isfinite(scores).all()):
            raise InputError(f"the model's outputs for {batch} are NaN or infinite: look at its activations")
        return torch.multinomial(scores.softmax(-1).flatten(0, -2), 1).reshape(scores.shape[:-1])

    def __call__(self, outputs: Any, batch: Batch, drawn: Any = None) -> Tensor:
        """Return a finite number that has a gradient; ``drawn``: labels for a batch that has none."""
        labels, loss = batch.labels, self._loss
        if loss is None and not (isinstance(outputs, Tensor) and outputs.dim() >= 2):
            told = (
                f"of shape {tuple(outputs.shape)}"
                if isinstance(outputs, Tensor)
                else f"a {type(outputs).__name__}"
            )
            raise InputError(
                f"the model's output is {told}, not classes' scores [images, classes, ...]: give loss=, a function "
                "of (outputs, labels)"
            )
        if loss is None and labels is None:
            labels = self.drawn(outputs, batch) if drawn is None else drawn
        try:
            value = F.cross_entropy(outputs.float(), labels) if loss is None else loss(outputs, labels)
        except SmcpError:
            raise
        except Exception as error:
            raise InputError(
                f"the loss of {batch} fails: {type(error).__name__}: {first_line(error)}"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value).all()):
            shown = (
                f"of shape {tuple(value.shape)}"
                if isinstance(value, Tensor) and value.numel() != 1
                else f"{value}"
            )
            raise InputError(f"the loss of {batch} is {shown}; it must be one finite number, as a tensor")
        if not value.requires_grad:
            raise InputError(
                f"the loss of {batch} has no gradient: it must be computed from the outputs, by torch"
            )
        return value
