"""Notices a training loop that uses the pruner wrongly, and says so.

What can be told is told from where Python already passes: the parameters' version counters (every optimiser
step raises them), and a hook on one weight that runs in each backward pass. The device is not asked anything.
"""

from __future__ import annotations

import sys
import warnings
import weakref

from torch import Tensor, nn

from smcp_fx.errors import TrainingError

#: Backward passes after optimiser steps without a call of `Pruner.step` before it is called forgotten.
_FORGOTTEN = 3
#: Calls of `Pruner.step` between which no parameter changed, before somebody is told; most calls, that is.
_UNCHANGED = 5


class TrainingWarning(UserWarning):
    """Something about the training that makes pruning work badly; the message says what to change."""


def tell(message: str) -> None:
    """Warn of it, at the line of the user's code that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("smcp_fx"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, TrainingWarning, stacklevel=level)


class LoopWatch:
    """Watches one prepared model; ``weight`` is the masked weight nearest to the loss."""

    def __init__(self, model: nn.Module, weight: str | None) -> None:
        self._name = weight
        self._parameters = model.parameters  # bound: parameters may be replaced
        self._model = weakref.ref(model)
        self._watched: weakref.ref[nn.Parameter] | None = None
        self._told: set[str] = set()
        self.active = False  # whether the schedule needs steps to be counted
        self._calls = 0
        self._unchanged = 0
        self._versions = -1
        self.backwards = 0
        self._attach()

    def _attach(self) -> None:
        """Hook the weight (anew, where it was replaced)."""
        model = self._model()
        weight = None if model is None or self._name is None else model.get_parameter(self._name)
        self._fired = self._fresh = False
        self._missed = 0
        self._counted = True  # whether `step` was called since the last optimiser step
        self._version = -1
        self._gradient: weakref.ref[Tensor] | None = None
        self._watched = None if weight is None else weakref.ref(weight)
        if weight is not None and weight.requires_grad:
            owner = weakref.ref(self)

            def hook(parameter: Tensor) -> None:
                watch = owner()
                if watch is not None:
                    watch._backward(parameter)

            handle = weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(
                self, handle.remove
            ).atexit = False  # converted models keep the weight, not the hook

    def _tell(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            tell(message)

    def _backward(self, weight: Tensor) -> None:
        """A backward pass reached the weight."""
        self.backwards += 1
        if self._fired and weight._version != self._version:  # the optimiser has stepped in between
            self._missed = 0 if self._counted else self._missed + 1
            self._counted = False
            if self._missed >= _FORGOTTEN and self.active:
                self._tell(
                    "forgotten",
                    f"{self._missed} optimiser steps went by without prepared.pruner.step(): no importance is "
                    "gathered and no mask is solved for. Call it once an optimiser step, after loss.backward() and "
                    "before optimizer.step().",
                )
        self._fired = self._fresh = True
        self._version = weight._version

    def before_step(self, training: bool, scaled: bool) -> None:
        """Check what `Pruner.step` is called on; ``scaled``: a gradient scaler may have left out steps.

        Raises `TrainingError` when no backward pass came since the last call.
        """
        model = self._model()
        if model is None:
            return
        if not training:
            self._tell(
                "eval",
                "prepared.pruner.step() was called with the model in eval mode: batch norms use their running "
                "statistics and the importances are those of another network. Call prepared.train() before the "
                "training loop, and again after each evaluation.",
            )
        weight = None if self._watched is None else self._watched()
        if self._name is not None and (weight is None or model.get_parameter(self._name) is not weight):
            self._attach()
        elif weight is not None and weight.grad is not None and self._fired:
            known = None if self._gradient is None else self._gradient()
            if not self._fresh and known is weight.grad:
                raise TrainingError(
                    "prepared.pruner.step() was called without a backward pass since its last call: it would count "
                    "the same gradients twice. Call it once an optimiser step, after loss.backward() and before "
                    "optimizer.step(); with gradient accumulation, after the last micro-batch's backward()."
                )
            if self._fresh and weight._version != self._version:
                self._tell(
                    "late",
                    "the weights changed between loss.backward() and prepared.pruner.step(): importances are the "
                    "gradients times the weights they belong to. Call it before optimizer.step().",
                )
        self._count_unchanged(scaled)
        self._fresh = False
        self._counted = True
        self._missed = 0
        if weight is not None and weight.grad is not None:
            self._gradient = weakref.ref(weight.grad)

    def _count_unchanged(self, scaled: bool) -> None:
        versions = sum(parameter._version for parameter in self._parameters() if parameter.requires_grad)
        self._calls += 1
        if versions == self._versions and not scaled:
            self._unchanged += 1
        self._versions = versions
        if self._unchanged >= _UNCHANGED and 2 * self._unchanged >= self._calls:
            self._tell(
                "unchanged",
                f"no parameter changed between {self._unchanged} of {self._calls} calls of prepared.pruner.step(). "
                "Either the optimiser holds other parameters (prepare copies the model: build the optimiser on "
                "prepared.parameters()), or step() is called for every micro-batch (call it once an optimiser step).",
            )
