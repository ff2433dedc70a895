"""Names for the operations of a graph: one name, whether called as function, method or module.

Only the callables of torch's own namespaces have a name. An operation without a name is unknown, and its channels are
pinned (the channel graph is a closed world). `F.leaky_relu`, `Tensor.leaky_relu_` and
`nn.LeakyReLU` all are "leakyrelu": lower case, no underscores.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

_IN_OPERATORS = frozenset("iadd isub imul itruediv ipow ifloordiv imod iand ior ixor setitem".split())
_ALIASES = {
    **{f"i{name}": name for name in ("add", "sub", "mul", "pow", "floordiv", "mod", "and", "or", "xor")},
    **{f"{norm}{axes}d": norm for norm in ("batchnorm", "instancenorm") for axes in (1, 2, 3)},
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
}
#: Functions of other packages that are wrapped as graph leaves; named so that they need not be imported.
_FOREIGN = {
    ("torchvision.ops.stochastic_depth", "stochastic_depth"): "stochasticdepth",
    ("torch._ops.torchvision", "deform_conv2d"): "deformconv2d",
    ("torchvision.ops.drop_block", "drop_block2d"): "dropblock2d",
    ("torchvision.ops.drop_block", "drop_block3d"): "dropblock3d",
    ("smcp_fx.tracing.modes", "by_mode"): "bymode",
    ("smcp_fx.tracing.modes", "left_out"): "leftout",
    ("smcp_fx.tracing.constant_values", "overwritten"): "overwritten",
    ("torch._ops.torchvision", "roi_align"): "roialign",
    ("torch._ops.torchvision", "roi_pool"): "roipool",
    ("smcp_fx.regions.carriers", "carried_channels"): "carriedchannels",
    ("smcp_fx.tracing.recurrent", "recurrent"): "recurrent",
    ("smcp_fx.tracing.recurrent", "recurrent_weight"): "recurrentweight",
}


def normal_name(name: str) -> str:
    """Return the name in normal form, aliases resolved."""
    plain = name.lower().replace("_", "")
    return _ALIASES.get(plain, plain)


def _function_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for space in (torch.nn.functional, torch, torch._C._nn, torch.special, operator, math):
        for name in dir(space):
            value = getattr(space, name, None)
            if callable(value) and not isinstance(value, type) and not name.startswith("__"):
                names.setdefault(id(value), normal_name(name))
    names.update((id(getattr(torch.fft, name)), normal_name(f"fft{name}")) for name in torch.fft.__all__)
    names[id(getattr)] = "getattr"
    names[id(torch.linalg.norm)], names[id(torch.linalg.vector_norm)] = "norm", "vectornorm"
    return names


#: Made at import: during a trace, stand-ins replace some functions.
_NAMES = _function_names()


def function_name(function: Callable[..., Any]) -> str | None:
    """Return the operation a function performs, or None when it is not one of torch's."""
    name = _NAMES.get(id(function))
    key = (getattr(function, "__module__", None), getattr(function, "__name__", None))
    if name is None and type(function).__module__ == "smcp_fx.tracing.autograd_functions":
        return getattr(function, "operation", None)
    return name if name is not None else _FOREIGN.get(key)  # type: ignore[arg-type]


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


def operation_of(model: nn.Module, node: fx.Node) -> str | None:
    """Return the name of a node's operation, whichever way the network calls it; None where it has none."""
    return operation_name(node, model.get_submodule(str(node.target)) if node.op == "call_module" else None)


def result_of(node: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
    """Return what a call node gives for these arguments (its module given for `call_module`)."""
    if module is not None:
        return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def readable_name(node: fx.Node) -> str:
    """Return how a reader would name the node's operation, for messages."""
    if callable(node.target):
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target)


def writes_in_place(node: fx.Node, module: nn.Module) -> bool:
    """Does the node, of a graph of ``module``, change its first operand?"""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    of_python = getattr(operator, name, None) is node.target  # `and_` only has the name: `and` is a keyword
    plain = name.endswith("_") and not name.endswith("__") and not of_python
    in_operator = of_python and name in _IN_OPERATORS
    place = _place_of_inplace(node.target) if callable(node.target) else None
    asked = node.args[place] if place is not None and len(node.args) > place else node.kwargs.get("inplace")
    return plain or in_operator or asked is True


@functools.cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    """Where a function of torch.nn.functional takes ``inplace``, when that is by position."""
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return None
    names = [*inspect.signature(function).parameters]
    return names.index("inplace") if "inplace" in names else None
