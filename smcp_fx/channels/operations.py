"""Names for the operations of a graph: one name, whether called as function, method or module.

Only the callables of torch's own namespaces have a name; what has none is an unknown operation, and what is
unknown is pinned (the channel graph is a closed world). `F.leaky_relu`, `Tensor.leaky_relu_` and
`nn.LeakyReLU` all are "leakyrelu": lower case, no underscores.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

_ALIASES = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "itruediv": "div",
    "truediv": "div",
    "truedivide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "absolute": "abs",
    "negative": "neg",
    "syncbatchnorm": "batchnorm",
    "batchnorm1d": "batchnorm",
    "batchnorm2d": "batchnorm",
    "batchnorm3d": "batchnorm",
    "instancenorm1d": "instancenorm",
    "instancenorm2d": "instancenorm",
    "instancenorm3d": "instancenorm",
}
#: Functions of other packages that are wrapped as graph leaves; named so that they need not be imported.
_FOREIGN = {("torchvision.ops.stochastic_depth", "stochastic_depth"): "stochasticdepth"}


def normal_name(name: str) -> str:
    """Return the name in normal form, aliases resolved."""
    plain = name.lower().replace("_", "")
    return _ALIASES.get(plain, plain)


@functools.cache
def _function_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for space in (torch.nn.functional, torch, torch._C._nn, torch.special, operator, math):
        for name in dir(space):
            value = getattr(space, name, None)
            if callable(value) and not isinstance(value, type) and not name.startswith("__"):
                names.setdefault(id(value), normal_name(name))
    names[id(getattr)] = "getattr"
    return names


def function_name(function: Callable[..., Any]) -> str | None:
    """Return the operation a function performs, or None when it is not one of torch's."""
    found = _function_names().get(id(function))
    key = (getattr(function, "__module__", None), getattr(function, "__name__", None))
    return found if found is not None else _FOREIGN.get(key)  # type: ignore[arg-type]


def module_name(module: nn.Module) -> str | None:
    """Return the operation a module performs; None for classes that are not exactly one of torch.nn's."""
    plain = type(module).__module__.startswith("torch.nn.modules")
    return normal_name(type(module).__name__) if plain and not is_changed(module) else None


def is_changed(module: nn.Module) -> bool:
    """Tell whether hooks or parametrisations make the module do more than its class says."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or nn.utils.parametrize.is_parametrized(module)
    )


def operation_name(node: fx.Node, module: nn.Module | None) -> str | None:
    """Return the operation of a call node (its module given for `call_module`), None when unknown."""
    if module is not None:
        return module_name(module)
    if node.op == "call_method":
        return normal_name(str(node.target))
    return function_name(node.target) if callable(node.target) else None


def describe(node: fx.Node) -> str:
    """Return how a reader would name the node's operation, for messages."""
    if callable(node.target):
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)
