"""Multiply the batch norms' scales into their weights, and give the modules their calls back."""

from __future__ import annotations

import torch
from torch import fx

from smcp_fx.errors import PassError
from smcp_fx.masking import scale_gamma, scale_gamma_direct
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.fold_masks import attribute, restore_call


class FoldBatchNormScalers(GraphPass):
    """The inverse of `InsertBatchNormScalers`, with the scaled weights in place of the unscaled ones."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Fold."""
        report = []
        graph = module.graph
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in (scale_gamma, scale_gamma_direct):
                continue
            gamma, scale = node.args
            with torch.no_grad():
                attribute(module, gamma).mul_(attribute(module, scale))
            for use in list(node.users):
                restore_call(graph, use, gamma)
            for dead in (node, scale, gamma):
                if not dead.users:
                    graph.erase_node(dead)
            report.append(f"{gamma.target}: scale folded")
        return PassResult(module, bool(report), tuple(report))

    def ensures(self, module: fx.GraphModule) -> None:
        """No scale is left."""
        if any(node.target in (scale_gamma, scale_gamma_direct) for node in module.graph.nodes):
            raise PassError("FoldBatchNormScalers left a scale in the graph")
