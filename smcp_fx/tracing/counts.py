"""Python numbers that forward counts up: if they decide what is computed, the module stays Python.

self.steps += 1
if self.steps > 1000: x = self.blur(x)      a graph would always do what the first call did
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.attributes import numbers_of
from smcp_fx.tracing.example_runs import unchanged

#: What is added to a counter, to see whether it decides anything later. Chosen, not measured.
_LATER = 10**6


#: Numbers: which module keeps them, and under which name.
Counters = set[tuple[nn.Module, str]]


class CountsError(TraceError):
    """What the modules of these ``paths`` compute depends on how often they were called."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        names = ", ".join(repr(path) if path else "the model itself" for path in sorted(paths))
        super().__init__(
            f"What {names} computes depends on a number that its forward counts up, which a graph would hold as it "
            "is now. Move that into a module of its own: it is then called as it is."
        )


class Counts:
    """The numbers of a model before it is traced in one mode."""

    def __init__(self, model: nn.Module) -> None:
        self._before = numbers_of(model)

    def changed(self, model: nn.Module) -> Counters:
        """Those that are others now."""
        return {key for key, value in numbers_of(model).items() if self._before.get(key) != value}

    def among(
        self, changed: Counters, model: nn.Module, inputs: tuple[Any, ...], set_modes: Callable[[], None]
    ) -> Counters:
        """Those that change in every call: the model is called twice."""
        modes = [(module, module.training) for module in model.modules()]
        with unchanged(model), torch.no_grad():
            set_modes()
            for _ in range(2):
                now = numbers_of(model)
                try:
                    model(*pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, inputs))
                except Exception:  # it does not take the example in this mode
                    changed = set()
                after = numbers_of(model)
                changed = {key for key in changed if after.get(key) != now.get(key)}
        for module, mode in modes:
            module.training = mode
        return changed

    def put(self, counters: Counters) -> None:
        """Set these as they are much later."""
        for module, name in counters:
            vars(module)[name] = self._before.get((module, name), 0) + _LATER


def paths_of(model: nn.Module, counters: Counters) -> set[str]:
    """Where the modules are that keep these numbers."""
    owners = {module for module, _ in counters}
    return {path for path, module in model.named_modules() if module in owners}
