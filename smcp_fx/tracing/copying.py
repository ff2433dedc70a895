"""Copies of modules that keep results of an earlier forward, and copies that run in double precision.

A hook-made weight (``weight_norm``, ``spectral_norm``, pruned layers) and a cached feature map are tensors that
autograd computed; `copy.deepcopy` refuses these. Nothing is lost when the copy holds their values: the next
forward computes them anew.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_T = TypeVar("_T")
#: Methods that name a type.
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
#: The attributes in which a module holds its parts.
TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class _Detached(TorchFunctionMode):
    """Lets `Tensor.__deepcopy__` copy the values of computed tensors, cut off from the graph that made them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def deep_copy(value: _T, memo: dict[int, Any] | None = None) -> _T:
    """`copy.deepcopy`, with computed tensors copied by value, and parameters that can be trained.

    (Those of scripted modules would be computed from the original's.)
    """
    with _Detached(), torch.no_grad():
        copied = copy.deepcopy(value, memo)
    sides = [list(side.values()) if isinstance(side, dict) else [side] for side in (value, copied)]
    for one, other in zip(*sides, strict=True):
        for old, new in zip(_parameters(one), _parameters(other), strict=True):
            new.requires_grad_(old.requires_grad)
    return copied


def _parameters(value: Any) -> list[Tensor]:
    return list(value.parameters()) if isinstance(value, nn.Module) else []


def widened(value: _T) -> _T:
    """A copy in double precision of a module, or of the tensors in nested inputs."""
    if isinstance(value, nn.Module):
        return deep_copy(value).double()
    wide: _T = pytree.tree_map(
        lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, value
    )
    return wide


class InDouble(TorchFunctionMode):
    """Runs `widened` modules: every floating-point type that their forward names, or leaves out, is float64."""

    def __enter__(self) -> InDouble:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(
            lambda v: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v,
            (args, kwargs or {}),
        )
        return (Tensor.double if func in _CASTS else func)(*args, **kwargs)


def sharing(owner: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A `GraphModule` of the graph that shares ``owner``'s tables of submodules, parameters and buffers."""
    module = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(owner).__name__)
    for table in TABLES:
        module.__dict__[table] = owner.__dict__[table]
    module.training = owner.training
    module.graph = graph
    return module


def copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Give each module of ``target`` the train/eval mode of the module of its name in ``source``."""
    modes = {name: module.training for name, module in source.named_modules()}
    for name, module in target.named_modules():
        module.training = modes.get(name, source.training)
