"""Which sizes follow the input, seen from a second run on other images."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import fx


class Sizes:
    """Sizes in a traced network: the ``values`` recorded on the example, and the ``other`` ones, on other images."""

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        self._nodes = module.graph.nodes
        self.values, self.other = values, other

    def follow_input(self, node: fx.Node, dim: int | None = None) -> bool:
        """Does the dimension's size change with the images? Without ``dim``: does the number depend on one?"""
        if dim is None:
            return node in self._numbers
        here, there = (getattr(values.get(node.name), "shape", ()) for values in (self.values, self.other))
        return len(here) == len(there) > 0 and bool(here[dim] != there[dim])

    @functools.cached_property
    def _numbers(self) -> set[fx.Node]:
        """Numbers that differ for other images, and numbers computed from these."""
        following: set[fx.Node] = set()
        for node in self._nodes:
            here, there = self.values.get(node.name), self.other.get(node.name)
            differs = type(here) is int and type(there) is int and here != there
            computed = type(here) in (int, float, bool) and not following.isdisjoint(node.all_input_nodes)
            if differs or computed:
                following.add(node)
        return following

    @functools.cached_property
    def sides_differ(self) -> bool:
        """Do the other images differ in their sides, not in their number alone?"""
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        ranks = [len(getattr(self.values[node.name], "shape", ())) for node in inputs]
        return any(
            self.follow_input(node, dim)
            for node, rank in zip(inputs, ranks, strict=True)
            for dim in range(2, rank)
        )
