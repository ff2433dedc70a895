"""Run operations on labels or positions instead of a tensor's values, to see what they move where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.channels.execution import known_values, perform
from smcp_fx.channels.labels import compact, narrow_uniform, varied_dims


class LabelRuns:
    """Runs a module's nodes. ``old`` and ``new``: every node's labels before slicing, and of the channels kept."""

    def __init__(self, module: fx.GraphModule, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self.module, self.old, self.new = module, old, new

    def agrees(self, node: fx.Node, expected: Any) -> bool:
        """Execute the rewritten node on the kept labels: does it give the labels expected of it?"""
        try:
            found = self._execute(node, lambda n: self.new[n.name])
        except (RuntimeError, IndexError, ValueError):
            return False
        left, right = pytree.tree_leaves(found), pytree.tree_leaves(expected)
        return len(left) == len(right) and all(
            not isinstance(b, Tensor) or (isinstance(a, Tensor) and torch.equal(a, b))
            for a, b in zip(left, right, strict=True)
        )

    def fits(self, node: fx.Node, expected: Tensor) -> bool:
        """Does the rewritten node give labels of the expected shape?"""
        try:
            found = self._execute(node, lambda n: self.new[n.name])
        except (RuntimeError, IndexError, ValueError):
            return False
        return isinstance(found, Tensor) and found.shape == expected.shape

    def _execute(self, node: fx.Node, environment: Callable[[fx.Node], Any]) -> Any:
        args, kwargs = known_values(fx.node.map_arg((node.args, node.kwargs), environment))
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))(*args, **kwargs)
        return perform(node, args, kwargs)

    def orders(self, node: fx.Node, kept: tuple[int, Tensor], wanted: Tensor) -> bool:
        """Does the rewritten node fetch the elements at the old positions ``wanted``, not just their labels?"""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        found = self.order(node, self.new[source.name].shape, kept[0], self.new)
        return found is not None and torch.equal(kept[1][found], wanted)

    def order(
        self, node: fx.Node, shape: torch.Size, dim: int, environment: Mapping[str, Any]
    ) -> Tensor | None:
        """For an operation that permutes or selects along one axis: the position that each output comes from."""
        moved = self._moved(node, shape, dim, environment)
        if moved is None:
            return None
        if varied_dims(moved) not in ([dim], []) or moved.dim() != len(shape):
            return None
        for other in range(moved.dim()):
            if other != dim:
                moved = moved.narrow(other, 0, 1)
        return moved.reshape(-1)

    def keeps_others(self, node: fx.Node, shape: torch.Size, dim: int) -> bool:
        """Does the operation leave everything where it is along the other dimensions?"""
        for other in range(len(shape)):
            moved = self._moved(node, shape, other, self.old)
            if moved is None or moved.dim() != len(shape):
                return False
            if other != dim and not _same(
                moved, _ruler((*shape[:dim], moved.shape[dim], *shape[dim + 1 :]), other)
            ):
                return False
        return True

    def _moved(
        self, node: fx.Node, shape: torch.Size, dim: int, environment: Mapping[str, Any]
    ) -> Tensor | None:
        """What the operation makes of a tensor that holds the positions along one dimension."""
        ruler, source = _ruler(shape, dim), node.args[0]
        try:
            return compact(self._execute(node, lambda n: ruler if n is source else environment[n.name]))
        except (RuntimeError, IndexError, ValueError):
            return None


def _same(labels: Tensor, others: Tensor) -> bool:
    return labels.shape == others.shape and torch.equal(narrow_uniform(labels), narrow_uniform(others))


def _ruler(shape: Sequence[int], dim: int) -> Tensor:
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return torch.arange(shape[dim]).reshape(view).expand(shape)


def repeat(labels: Tensor, dim: int) -> bool:
    """Do positions along the dimension share a label, which then does not tell them apart (pixel unshuffle)?"""
    for other in range(labels.dim()):
        if other != dim:
            labels = labels.narrow(other, 0, 1)
    return bool(torch.unique(labels).numel() < labels.numel())
