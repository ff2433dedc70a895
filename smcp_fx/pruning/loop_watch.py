"""Warns of a training loop that misuses the pruner.

The evidence costs next to nothing: the parameters' version counters (most optimisers raise them in each
step), and hooks on the masked weights that run in each backward pass. Only the warning that no parameter
changes reads from the device.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.errors import TrainingError

#: Optimiser steps without a call of `Pruner.step` before it counts as forgotten. Chosen, not measured.
_FORGOTTEN = 3
#: The same if `Pruner.step` was called before, or if optimiser steps are only inferred from new gradients:
#: more than an optimiser with a closure takes (25 in `torch.optim.LBFGS`).
_FORGOTTEN_PERHAPS = 50
#: Packages whose code is not the user's.
_OURS = ("smcp_fx", "torch")
#: Calls of `Pruner.step` without a changed parameter before the warning. Chosen, not measured.
_UNCHANGED = 5


class TrainingWarning(UserWarning):
    """The training loop makes pruning work badly; the message says what to change."""


def tell(message: str, category: type[Warning] = TrainingWarning) -> None:
    """Warn, at the line of the user's code that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class LoopWatch:
    """Watches one prepared model; ``weights`` names its masked weights, the one nearest to the loss last."""

    def __init__(self, model: nn.Module, weights: Sequence[str]) -> None:
        self._paths = [name.split(".") for name in weights]
        self._parameters = model.parameters  # bound: parameters may be replaced
        self._model = weakref.ref(model)
        self._told: set[str] = set()
        self.active = False  # whether the schedule needs steps to be counted
        self._calls = 0
        self._unchanged = 0
        self._versions = -1
        self._sampled: Tensor | None = None
        self._versions_tell = True  # whether the optimiser raises version counters
        self.backwards = 0
        self._detach: Callable[[], Any] | None = None
        self._attach(self._learning(model))

    def _learning(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the masked weights that take gradients."""
        weights = (_parameter(model, path) for path in self._paths)
        return [weight for weight in weights if weight.requires_grad]

    def _attach(self, weights: Sequence[nn.Parameter]) -> None:
        """Hook these weights and watch the last one; repeat if some were replaced, frozen or thawed."""
        self.close()
        self._ran = self._fired = False  # whether a gradient ever reached any weight, or the watched one
        self._fresh = self._reached = False  # the same since the last `step`
        self._missed = 0
        self._counted = True  # whether `step` was called since the last optimiser step
        self._version = -1
        # A gradient at the last `step`, and the watched weight's after the last backward pass.
        self._gradient = self._accumulated = _nothing
        self._hooked = [weakref.ref(weight) for weight in weights]
        self._watched: Callable[[], Tensor | None] = self._hooked[-1] if weights else _nothing
        owner = weakref.ref(self)

        def reached(_: Tensor) -> None:
            watch = owner()
            if watch is not None:
                watch._ran = watch._fresh = True

        def backward(parameter: Tensor) -> None:
            watch = owner()
            if watch is not None:
                watch._backward(parameter)

        hooks = [reached] * (len(weights) - 1) + [backward]
        handles = [
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for weight, hook in zip(weights, hooks, strict=False)
        ]
        self._detach = weakref.finalize(self, _remove, handles)
        self._detach.atexit = False

    def close(self) -> None:
        """Remove the hooks: the weights go on without the pruner, like those of converted models."""
        if self._detach is not None:
            self._detach()

    def _tell(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            tell(message)

    def _backward(self, weight: Tensor) -> None:
        """Note that a backward pass reached the watched weight."""
        self.backwards += 1
        changed = weight._version != self._version
        # The optimiser has stepped since the last backward pass.
        if self._fired and (changed or weight.grad is not self._accumulated()):
            self._missed = 0 if self._counted else self._missed + 1
            self._counted = False
            sure = changed and not self._calls
            if self._missed >= (_FORGOTTEN if sure else _FORGOTTEN_PERHAPS) and self.active:
                self._tell(
                    "forgotten",
                    f"{self._missed} optimiser steps went by without prepared.pruner.step(): no importance is "
                    "gathered and no mask is solved for. Call it once an optimiser step, after loss.backward() and "
                    "before optimizer.step().",
                )
        self._ran = self._fired = self._fresh = self._reached = True
        self._version = weight._version
        self._accumulated = _weak(weight.grad)

    def before_step(self, training: bool, scaled: bool) -> None:
        """Check the state at a call of `Pruner.step`; ``scaled``: a gradient scaler may have skipped steps.

        Raises `TrainingError` if no backward pass has run since the last call.
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
        weight = self._watched()
        learning = self._learning(model)
        if len(learning) != len(self._hooked) or any(
            one is not hooked() for one, hooked in zip(learning, self._hooked, strict=True)
        ):
            self._attach(learning)
        else:
            gradient = self._gradient()
            same = gradient is not None and any(one.grad is gradient for one in learning)
            if self._ran and same and not self._fresh:
                raise TrainingError(
                    "prepared.pruner.step() was called without a backward pass since its last call: it would count "
                    "the same gradients twice. Call it once an optimiser step, after loss.backward() and before "
                    "optimizer.step(); with gradient accumulation, after the last micro-batch's backward()."
                )
            if weight is not None and self._reached and weight._version != self._version:
                self._tell(
                    "late",
                    "the weights changed between loss.backward() and prepared.pruner.step(): importances are the "
                    "gradients times the weights they belong to. Call it before optimizer.step().",
                )
        self._count_unchanged(scaled)
        self._fresh = self._reached = False
        self._counted = True
        self._missed = 0
        self._gradient = _weak(next((one.grad for one in reversed(learning) if one.grad is not None), None))

    def _count_unchanged(self, scaled: bool) -> None:
        learning = [parameter for parameter in self._parameters() if parameter.requires_grad]
        versions = sum(parameter._version for parameter in learning)
        unchanged = versions == self._versions and not scaled
        self._calls += 1
        self._unchanged += unchanged
        self._versions = versions
        seldom = self._unchanged < _UNCHANGED or 2 * self._unchanged < self._calls
        if seldom or not learning or not self._versions_tell:
            return
        # Fused optimisers, and optimisers that write to `parameter.data`, raise no counters: compare values.
        sample = _sample(learning)
        if unchanged and self._sampled is not None:
            self._versions_tell = False
            if torch.equal(sample, self._sampled):
                self._tell(
                    "unchanged",
                    f"no parameter changed between {self._unchanged} of {self._calls} calls of "
                    "prepared.pruner.step(). Either the optimiser holds other parameters (prepare copies the model: "
                    "build the optimiser on prepared.parameters()), or step() is called for every micro-batch (call "
                    "it once an optimiser step), or a GradScaler leaves steps out (pass it: step(scaler)).",
                )
        self._sampled = sample


def _parameter(model: nn.Module, path: Sequence[str]) -> nn.Parameter:
    """Do as `get_parameter`, ten times faster: this runs for every weight in every step."""
    *owners, name = path
    module: Any = model
    for owner in owners:
        module = module._modules[owner]
    weight: nn.Parameter = module._parameters[name]
    return weight


def _nothing() -> Tensor | None:
    return None


def _weak(tensor: Tensor | None) -> Callable[[], Tensor | None]:
    return _nothing if tensor is None else weakref.ref(tensor)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


@torch.no_grad()
def _sample(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the first row of each parameter on the first one's device."""
    device = parameters[0].device
    rows = [p.view(1) if p.dim() == 0 else p[:1].flatten() for p in parameters if p.device == device]
    return torch.cat([row.double() for row in rows])
