"""Give recurrent layers their calls back: the inverse of `smcp_fx.tracing.recurrent.open_recurrent_layers`."""

from __future__ import annotations

from torch import fx, nn

from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.tracing.recurrent import recurrent


class RestoreRecurrentLayers(GraphPass):
    """Calls the modules again; they hold the weights and sizes."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        report = []
        for node in list(module.graph.nodes):
            if node.target is not recurrent:
                continue
            owner, weights, x, state = node.args
            assert isinstance(owner, fx.Node) and isinstance(weights, list)
            node.op, node.target = "call_module", str(owner.target)
            node.args = (x,) if state is None else (x, state)
            for weight in weights:
                for dead in (weight, *weight.args[1:]):
                    if not dead.users:
                        module.graph.erase_node(dead)
            if not owner.users:
                module.graph.erase_node(owner)
            layer = module.get_submodule(str(node.target))
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # on a GPU, this puts the weights into one piece of memory
            report.append(f"{node.target}: called as a module")
        return PassResult(module, bool(report), tuple(report))
