"""Walks nested tuples, lists and dicts of values, as nodes take and return them.

`torch.utils._pytree` does the same for any structure, and takes ten times as long for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.immutable_collections import immutable_list
from torch.utils import _pytree as pytree

_LISTS = (tuple, list, immutable_list)
#: Types that hold no other values. `pytree` is slow to check; `leaf_class` adds our own classes.
_LEAVES: set[type] = {int, float, bool, str, slice, type(None), torch.dtype, torch.device}
Class = TypeVar("Class", bound=type)


def leaf_class(kind: Class) -> Class:
    """Mark a class as one whose instances are values, and hold no others."""
    _LEAVES.add(kind)
    return kind


def leaves_of(tree: Any) -> list[Any]:
    """The values in a structure, in the order of `pytree.tree_leaves`."""
    kind = type(tree)
    if kind in _LISTS:
        return [leaf for part in tree for leaf in leaves_of(part)]
    if kind is dict:
        return [leaf for part in tree.values() for leaf in leaves_of(part)]
    if kind in _LEAVES or isinstance(tree, Tensor):
        return [tree]
    return pytree.tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure, with the function applied to each value."""
    kind = type(tree)
    if kind in _LISTS:
        return kind([mapped(function, part) for part in tree])
    if kind is dict:
        return {key: mapped(function, part) for key, part in tree.items()}
    if kind in _LEAVES or isinstance(tree, Tensor):
        return function(tree)
    return pytree.tree_map(function, tree)
