"""What a forward keeps for inputs of one size, forgotten while it is traced.

    if self.shape != x.shape: self.anchors, self.shape = anchors_for(x), x.shape

A model that ran before `prepare` would skip the computation, and its graph would fit that one size. Traced as if it
had never run, the graph computes the anchors in every call, for every size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.tracing.example_runs import run_eager, same_values


@contextmanager
def forgotten(model: nn.Module, inputs: tuple[Any, ...], expected: Any) -> Iterator[None]:
    """Forget what the forward itself fills in again, to the same outputs; remembered at the end."""
    kept = [(module, name, vars(module)[name]) for module in model.modules() for name in _caches(module)]
    try:
        for module, name, _ in kept:
            _forget_if_refilled(model, module, name, inputs, expected)
        yield
    finally:
        for module, name, value in kept:
            vars(module)[name] = value


def _caches(module: nn.Module) -> list[str]:
    """The attributes that may hold, or name, what was kept: only where some tensor or size is kept at all."""
    if module._forward_pre_hooks:  # what hooks compute (weight norm, pruning) is no cache of the forward
        return []
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (Tensor, torch.Size)) or _is_sizes(value)
    }
    worth = any(not _is_sizes(value) or isinstance(value, torch.Size) for value in plain.values())
    return sorted(plain, key=lambda name: isinstance(plain[name], Tensor)) if worth else []


def _is_sizes(value: Any) -> bool:
    """Is it a size, or sizes of several maps?"""
    return (
        isinstance(value, (tuple, list))
        and bool(value)
        and all(type(size) is int or _is_sizes(size) for size in value)
    )


def _forget_if_refilled(
    model: nn.Module, module: nn.Module, name: str, inputs: tuple[Any, ...], expected: Any
) -> None:
    """Forget one attribute, unless the forward needs it or does not set it again."""
    held = vars(module)[name]
    seen: list[Any] = []

    def run(*given: Any) -> Any:
        output = model(*given)
        seen.append(vars(module).get(name))
        return output

    if hasattr(type(module), name):  # what the class says before any forward
        del vars(module)[name]
    else:
        vars(module)[name] = None
    try:
        same = same_values(expected, run_eager(model, inputs, run)) and same_values(held, seen[0])
    except Exception:  # the forward may miss it in any way
        same = False
    if not same:
        vars(module)[name] = held
