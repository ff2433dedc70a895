"""Tensors that forward keeps in plain attributes: if a later call reads them, the module stays Python.

self.state = 0.9 * self.state + x      a graph would always start from what the first call found
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.example_runs import same_values, unchanged
from smcp_fx.tracing.same_draws import same_draws
from smcp_fx.tracing.sentences import listed_paths

#: Attributes: which module has them, and under which name.
Kept = set[tuple[nn.Module, str]]

#: What every module has.
_OWN = frozenset(vars(nn.Module()))


class RecallsError(TraceError):
    """What the modules of these ``paths`` compute depends on what they kept from the call before."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        names = listed_paths(sorted(paths - {""})) if paths - {""} else "the model itself"
        super().__init__(
            f"What {names} computes depends on tensors that its forward kept in plain attributes in the call before. "
            "Register them as buffers, or move what keeps them into a module of its own: it is then called as it is."
        )


def kept_by_forward(model: nn.Module) -> Kept:
    """The plain attributes that hold what was traced: forward has just assigned to them."""
    return {
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _OWN
        and name not in module._buffers
        and any(isinstance(leaf, Proxy) for leaf in pytree.tree_leaves(value))
    }


def recalled(
    kept: Kept, model: nn.Module, inputs: tuple[Any, ...], set_modes: Callable[[], None]
) -> set[str]:
    """The paths of the modules whose ``kept`` attributes change what the next call gives."""
    modes = [(module, module.training) for module in model.modules()]

    def call(given: dict[tuple[nn.Module, str], Any]) -> tuple[Any, dict[tuple[nn.Module, str], Any]]:
        fresh = pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, inputs)
        with unchanged(model), same_draws(), torch.no_grad():
            set_modes()
            for (module, name), value in given.items():
                vars(module)[name] = value
            # In containers of their own: a dict that the model keeps is emptied again.
            outputs = pytree.tree_map(lambda v: v, model(*fresh))
            held = {key: vars(key[0])[key[1]] for key in kept if key[1] in vars(key[0])}
            return outputs, pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, held)

    try:
        first, held = call({})
        if same_values(first, call(held)[0]):
            return set()
        guilty = {key[0] for key, value in held.items() if not same_values(first, call({key: value})[0])}
    except Exception:  # it does not take the example in this mode
        return set()
    finally:
        for module, mode in modes:
            module.training = mode
    guilty = guilty or {module for module, _ in held}
    return {path for path, module in model.named_modules() if module in guilty}
