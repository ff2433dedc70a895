"""Replace weights that are computed from parameters by their values.

    before   w = batch_norm(weight.reshape(1, out, -1), ..., gain); w = w.reshape(weight.shape); conv2d(x, w, bias)
    after    conv2d(x, weight, bias), weight holding what was computed

Standardising a sliced weight would not give the slice of the standardised weight: the function has to go before
channels do. Parameters that only it read go with it.
"""

from __future__ import annotations

import torch
from torch import fx

from smcp_fx.channels.computed_weights import computed_weights, evaluate
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.tracing.masking import MASKS


class FoldComputedWeights(GraphPass):
    """Stores each computed weight in the parameter it was computed from."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Fold, and drop what nothing reads any more."""
        report = []
        graph = module.graph
        for found in computed_weights(module, tuple(MASKS.values())):
            path, _, name = found.name.rpartition(".")
            with torch.no_grad():
                value = evaluate(module, found.through)
                assert isinstance(value, torch.Tensor)
                getattr(module.get_submodule(path), name).copy_(value)
            with graph.inserting_before(found.result):
                weight = graph.create_node("get_attr", found.name)
            found.result.replace_all_uses_with(weight)
            for node in reversed(found.through):
                if not node.users:
                    graph.erase_node(node)
            report.append(f"{found.name}: now holds what was computed from it")
        if report:
            report += _drop_unread(module, {str(n.target) for n in graph.nodes if n.op != "placeholder"})
        return PassResult(module, bool(report), tuple(report))


def _drop_unread(module: fx.GraphModule, read: set[str]) -> list[str]:
    """Delete parameters that no node reads, of modules that are not called."""
    dropped = []
    for name, _ in list(module.named_parameters()):
        path, _, attribute = name.rpartition(".")
        called = any(path == target or path.startswith(f"{target}.") for target in read)
        if name not in read and not called:
            delattr(module.get_submodule(path), attribute)
            dropped.append(f"{name}: read by nothing any more, deleted")
    return dropped
