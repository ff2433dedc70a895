"""Questions about values that Python asks while a model is traced, recognised by the nodes that they leave."""

from __future__ import annotations

import operator

from torch import fx

from smcp_fx.tracing.sentences import INFIX

#: Functions that ask whether a tensor's values are finite.
_OF_VALUES = {"isfinite", "isnan", "isinf"}
#: Functions that read a tensor's values, whatever they return.
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "data_ptr"}


def reads_values(node: fx.Node) -> bool:
    """Does the node call a function that reads a tensor's values?"""
    return _called(node) in _READS


def asks_if_finite(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """The tensor of `isfinite(x).all()`, and of `isnan(x).any()`, with the answer that finite values give."""
    for reduced, question, answer in (("all", ("isfinite",), True), ("any", ("isnan", "isinf"), False)):
        if _called(node) == reduced and len(node.args) == 1:
            inner = node.args[0]
            if (
                isinstance(inner, fx.Node)
                and _called(inner) in question
                and isinstance(inner.args[0], fx.Node)
            ):
                return inner.args[0], answer
    return None


def drop_constant_questions(graph: fx.Graph) -> None:
    """Erase comparisons that only answered Python, unless an assertion reads them."""
    for node in reversed(list(graph.nodes)):
        asked = node.op == "call_function" and (
            node.target in INFIX or node.target in (operator.not_, getattr)
        )
        if (asked or asks_if_finite(node) or _called(node) in _OF_VALUES) and not node.users:
            graph.erase_node(node)


def _called(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
