"""Drop joins that no longer join anything: concatenations of one tensor, additions of zero.

    before   add = constant_conv2 + x                      (a convolution without bias was removed: all zeros)
    after    x

Removed branches leave idle joins.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from smcp_fx.masking.masks import META, Constant
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.remove_branches import delete, joined_tensors
from smcp_fx.tracing.aliases import sources
from smcp_fx.tracing.operations import operation_name, operation_of, writes_in_place
from smcp_fx.tracing.traits import Trait, has

#: Operations that return a new tensor, which their own gradients do not read.
_OWN = set("add sub linear batchnorm".split()) | {f"conv{rank}d" for rank in (1, 2, 3)}


class DropIdleJoins(GraphPass):
    """Lets readers of an idle join read its one operand, unless they might write into a shared tensor."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        report = []
        for node in list(module.graph.nodes):
            zeros, other = _operands(module, node)
            if other is None:
                continue
            own = len(other.users) == 1 and operation_of(module, other) in _OWN
            if not own and any(_may_write(module, user) for user in node.users):
                continue
            node.replace_all_uses_with(other)
            module.graph.erase_node(node)
            if zeros is not None and not zeros.users:
                module.graph.erase_node(zeros)
                # Two calls may share the zeros.
                if all(other.target != zeros.target for other in module.graph.nodes):
                    delete(module, str(zeros.target))
            report.append(f"{node.name}: nothing but {other.name}")
        return PassResult(module, bool(report), tuple(report))


def _operands(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The zeros and the other operand of an idle join."""
    parts = joined_tensors(node)
    if len(parts) == 1:
        return None, parts[0]
    if operation_name(node, None) == "add" and len(node.args) == 2 and not node.kwargs:
        for one, other in (node.args, node.args[::-1]):
            if isinstance(other, fx.Node) and _is_zero(module, one):
                assert isinstance(one, fx.Node)
                return one, other
    return None, None


def _is_zero(module: fx.GraphModule, node: Any) -> bool:
    made = isinstance(node, fx.Node) and isinstance(node.meta.get(META), Constant)
    return made and not bool(module.get_parameter(str(node.target)).any())


def _may_write(module: fx.GraphModule, node: fx.Node) -> bool:
    joins = has(operation_of(module, node), Trait.JOINS | Trait.PADS)
    return writes_in_place(node, module) or bool(sources(node, module)) or joins
