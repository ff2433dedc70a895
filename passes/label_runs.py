"""Run operations on labels or positions instead of values, to see where they move each element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.channels.execution import moved, positions_along
from smcp_fx.channels.labels import compact, line_along, narrow_uniform, varied_dims


class LabelRuns:
    """Runs a module's nodes. ``old``, ``new``: every node's labels, of all channels and of the kept ones."""

    def __init__(self, module: fx.GraphModule, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self.module, self.old, self.new = module, old, new

    def agrees(self, node: fx.Node, expected: Any) -> bool:
        """Does the rewritten node give the expected labels, executed on the kept ones?"""
        try:
            result = moved(self.module, node, self.new)
        except (RuntimeError, IndexError, ValueError):
            return False
        left, right = pytree.tree_leaves(result), pytree.tree_leaves(expected)
        return len(left) == len(right) and all(
            not isinstance(b, Tensor) or (isinstance(a, Tensor) and torch.equal(a, b))
            for a, b in zip(left, right, strict=True)
        )

    def fits(self, node: fx.Node, expected: Tensor) -> bool:
        """Does the rewritten node give labels of the expected shape?"""
        try:
            result = moved(self.module, node, self.new)
        except (RuntimeError, IndexError, ValueError):
            return False
        return isinstance(result, Tensor) and result.shape == expected.shape

    def orders(self, node: fx.Node, kept: tuple[int, Tensor], wanted: Tensor) -> bool:
        """Does the rewritten node fetch the elements at the old positions ``wanted``, not just their labels?"""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        order = self.order(node, self.new[source.name].shape, kept[0], self.new)
        return order is not None and torch.equal(kept[1][order], wanted)

    def order(
        self, node: fx.Node, shape: torch.Size, dim: int, environment: Mapping[str, Any]
    ) -> Tensor | None:
        """For an operation that permutes or selects along one axis: the position that each output comes from."""
        places = self._moved(node, shape, dim, environment)
        if places is None or varied_dims(places) not in ([dim], []) or places.dim() != len(shape):
            return None
        return line_along(places, dim)

    def keeps_others(self, node: fx.Node, shape: torch.Size, dim: int) -> bool:
        """Does the operation move no element along the other dimensions?"""
        for other in range(len(shape)):
            places = self._moved(node, shape, other, self.old)
            if places is None or places.dim() != len(shape):
                return False
            full = (*shape[:dim], places.shape[dim], *shape[dim + 1 :])
            if other != dim and not _same(places, positions_along(full, other)):
                return False
        return True

    def _moved(
        self, node: fx.Node, shape: torch.Size, dim: int, environment: Mapping[str, Any]
    ) -> Tensor | None:
        """The operation's result for the positions along one dimension; None if it fails."""
        try:
            return compact(moved(self.module, node, environment, positions_along(shape, dim)))
        except (RuntimeError, IndexError, ValueError):
            return None


def _same(labels: Tensor, others: Tensor) -> bool:
    return labels.shape == others.shape and torch.equal(narrow_uniform(labels), narrow_uniform(others))


def repeat(labels: Tensor, dim: int) -> bool:
    """Do several positions along the dimension share a label (pixel unshuffle)?"""
    line = line_along(labels, dim)
    return bool(torch.unique(line).numel() < line.numel())
