"""Make masks permanent: multiply the weights, and give the modules their calls back.

The inverse of `InsertSoftMasks`, with the masked weights in place of the dense ones.
"""

from __future__ import annotations

import torch
from torch import fx

from smcp_fx.errors import PassError
from smcp_fx.masking import META, hard_mask, mark_of, soft_mask
from smcp_fx.passes.base import GraphPass, PassResult


def attribute(module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """Return the tensor a `get_attr` node reads."""
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    assert isinstance(value, torch.Tensor)
    return value


def restore_call(graph: fx.Graph, use: fx.Node, original: fx.Node) -> None:
    """Turn a `forward_with_weight` node back into the module call (or functional call) it was made from."""
    mark = mark_of(use)
    assert mark is not None
    if mark.path is None:
        replaced = use.args[1] if len(use.args) > 1 else use.kwargs["weight"]
        assert isinstance(replaced, fx.Node)
        use.replace_input_with(replaced, original)
    else:
        owner = use.args[0]
        use.op, use.target = "call_module", mark.path
        use.args = use.args[2:]
        assert isinstance(owner, fx.Node)
        graph.erase_node(owner)
    del use.meta[META]


class FoldMasks(GraphPass):
    """Folds every mask of the graph into its weight."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Fold."""
        report = []
        graph = module.graph
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in (soft_mask, hard_mask):
                continue
            weight, mask = node.args
            with torch.no_grad():
                tensor = attribute(module, weight)
                tensor.mul_(attribute(module, mask).to(tensor.dtype))
            for use in list(node.users):
                restore_call(graph, use, weight)
            for dead in (node, mask, weight):
                if not dead.users:
                    graph.erase_node(dead)
            report.append(f"{weight.target}: mask folded")
        return PassResult(module, bool(report), tuple(report))

    def ensures(self, module: fx.GraphModule) -> None:
        """No mask is left."""
        if any(node.target in (soft_mask, hard_mask) for node in module.graph.nodes):
            raise PassError("FoldMasks left a mask in the graph")
