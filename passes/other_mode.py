"""Weights that one mode computes from weights of the other mode's layers: kernels fused in eval mode.

    before   if self.training: y = self.a(x) + self.b(x)        else: y = conv2d(x, a.weight + b.weight)
    after    masks of a's and b's weights are in the sum, too

The two modes are two ways to compute one network, so both must leave out the same channels.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from smcp_fx.masking.masks import EVERY_MASK, SCALES, STATE, mark_of
from smcp_fx.tracing.modes import Condition, conditions, is_by_mode
from smcp_fx.tracing.values import canonical_names


class OtherMode:
    """The reads of parameters in a graph of two modes, recorded before a pass masks or scales them."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        nodes = list(module.graph.nodes)
        self._when: dict[fx.Node, Condition] = {}
        self._reads: dict[str, list[fx.Node]] = {}
        self._last: dict[fx.Node, fx.Node] = {}  # for each read, its latest product
        if any(map(is_by_mode, nodes)):
            self._when = conditions(nodes)
            names = canonical_names(module)
            for node in nodes:
                if node.op == "get_attr" and node.target in names:
                    self._reads.setdefault(names[str(node.target)], []).append(node)

    def show(self, uses: list[fx.Node], weight: str, factor: str, function: Callable[..., Tensor]) -> None:
        """Let nodes that never run together with ``uses`` read function(weight, state buffer ``factor``)."""
        graph = self._module.graph
        for read in self._reads.get(weight, ()):
            last = self._last.get(read, read)
            others = [user for user in last.users if user in self._when and self._apart(user, uses)]
            if not others:
                continue
            with graph.inserting_after(last):
                other = graph.create_node("get_attr", f"{STATE}.{factor}")
            with graph.inserting_after(other):
                self._last[read] = product = graph.call_function(function, (last, other))
            for user in others:
                user.replace_input_with(last, product)

    def _apart(self, user: fx.Node, uses: list[fx.Node]) -> bool:
        cases = (
            (one, other)
            for use in uses
            for one in self._when[user]
            for other in self._when.get(use, [frozenset()])
        )
        return all(any((flag, not side) in one for flag, side in other) for one, other in cases)


def fuses_in_one_mode(graph: fx.Graph) -> bool:
    """Does a node of a prepared graph read a product that `OtherMode.show` gave it?"""
    functions = (*EVERY_MASK, *SCALES.values())
    products = [node for node in graph.nodes if node.target in functions]
    return any(
        mark_of(user) is None and user.target not in functions for node in products for user in node.users
    )
