"""Copies of modules that keep results of an earlier forward.

A hook-made weight (``weight_norm``, ``spectral_norm``, pruned layers) and a cached feature map are tensors that
autograd computed; `copy.deepcopy` refuses these. Nothing is lost when the copy holds their values: the next
forward computes them anew.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

_T = TypeVar("_T")


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
    """`copy.deepcopy`, with computed tensors copied by value."""
    with _Detached():
        return copy.deepcopy(value, memo)
