"""Which sizes follow the input: what holds for one size of the images must hold for others."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import fx


class Sizes:
    """Sizes in a traced network: its recorded ``values``, and the ``other`` ones, of a run with other images."""

    def __init__(self, module: fx.GraphModule, values: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        self._nodes = module.graph.nodes
        self.values, self.other = values, other

    def follow_input(self, node: fx.Node, dim: int | None = None) -> bool:
        """Does the dimension have another size for other images? Without ``dim``: does a number follow such sizes?"""
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
            if differs or (
                type(here) in (int, float, bool) and not following.isdisjoint(node.all_input_nodes)
            ):
                following.add(node)
        return following

    @functools.cached_property
    def sides_differ(self) -> bool:
        """Are the other images larger or smaller, and not only more?"""
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        ranks = [len(getattr(self.values[node.name], "shape", ())) for node in inputs]
        return any(
            self.follow_input(node, dim)
            for node, rank in zip(inputs, ranks, strict=True)
            for dim in range(2, rank)
        )
