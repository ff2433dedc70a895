"""Learning from the dense network: what a smaller one answers is drawn to what the dense one answered.

(Knowledge distillation, Hinton, Vinyals and Dean 2015: with temperature T the divergence of the softened
distributions, times T squared so that its gradients keep their size.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smcp_fx.config import is_number
from smcp_fx.errors import InputError
from smcp_fx.tracing.copying import deep_copy
from smcp_fx.tracing.wrapping import is_prepared, unwrapped


class Teacher:
    """A dense network that a smaller one learns from: ``loss = 0.1 * loss + 0.9 * teacher(images, outputs)``.

    Holds a copy of ``model`` in eval mode, without gradients, and moves it to where the inputs are; it is no
    `nn.Module`, so that no optimiser, checkpoint or `DistributedDataParallel` takes it in.

    Args:
        model: the trained network, before `prepare`.
        temperature: softens both distributions.
        logits: returns the scores [images, classes, ...] from a model's output; by default the output itself, its
            entry or attribute ``logits``, or the only tensor of at least two dimensions in it.

    Raises `InputError` for what is no model or a prepared one, and for a temperature that is not positive.
    """

    def __init__(
        self, model: nn.Module, temperature: float = 1.0, logits: Callable[[Any], Tensor] | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Teacher needs an nn.Module, not {type(model).__name__}")
        if is_prepared(model):
            raise InputError(
                "a prepared model changes while it trains: make the Teacher of the model before prepare"
            )
        if not is_number(temperature) or not 0 < temperature < math.inf:
            raise InputError(f"temperature must be a positive number, not {temperature!r}")
        self.model = deep_copy(unwrapped(model)).requires_grad_(False).eval()
        self.temperature = float(temperature)
        self._logits = logits or _scores

    def __call__(self, inputs: Any, outputs: Any) -> Tensor:
        """Return the mean Kullback-Leibler divergence of the student's answers from the teacher's, in nats.

        ``inputs``: what the student was called with: a tensor, a tuple of several, or a dict of keyword inputs.
        ``outputs``: what it returned. Runs in the caller's `torch.autocast`; the divergence is computed in float32.

        Raises `InputError` where the two have no scores of one shape.
        """
        theirs = self._logits(outputs)
        with torch.no_grad():
            self.model.to(theirs.device)
            ours = self._logits(self._answer(inputs))
        if ours.shape != theirs.shape or ours.dim() < 2:
            raise InputError(
                f"the teacher's scores are of shape {tuple(ours.shape)}, the student's of {tuple(theirs.shape)}: "
                "both must be [images, classes, ...], and the inputs the same"
            )
        with torch.autocast(theirs.device.type, enabled=False):
            student, teacher = (
                F.log_softmax(scores.float() / self.temperature, 1) for scores in (theirs, ours)
            )
            divergence = F.kl_div(student, teacher, log_target=True, reduction="none").sum(1).mean()
        return divergence * self.temperature**2

    def _answer(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, (tuple, list)) else self.model(inputs)

    def __repr__(self) -> str:
        return f"<Teacher: {type(self.model).__name__}, temperature {self.temperature:g}>"


def _scores(outputs: Any) -> Tensor:
    """The scores in an output of a usual form."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    outputs = getattr(outputs, "logits", outputs)
    if isinstance(outputs, Tensor):
        return outputs
    held = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    found = (
        [v for v in held if isinstance(v, Tensor) and v.dim() > 1] if isinstance(held, (tuple, list)) else []
    )
    if len(found) != 1:
        raise InputError(
            f"the output is a {type(outputs).__name__} in which no one tensor is the scores: give Teacher(..., "
            "logits=function), which returns them [images, classes, ...]"
        )
    return found[0]
