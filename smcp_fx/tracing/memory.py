"""Which nodes of a graph are the memory of a tensor that the model holds, and which buffers are written into."""

from __future__ import annotations

from torch import Tensor, fx, nn

from smcp_fx.tracing.modes import is_by_mode
from smcp_fx.tracing.operations import may_be_operand, writes_in_place
from smcp_fx.tracing.values import canonical_names, held
from smcp_fx.tracing.views import may_be_seen


def memory_of_model(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that are the memory of a tensor that the model holds, under whatever name, with its name."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            if isinstance(held(model, str(node.target)), Tensor):
                found[node] = str(node.target)
        elif node.op in ("call_function", "call_method"):
            operands = node.args[1:] if is_by_mode(node) else node.args[:1]
            known = [found[one] for one in operands if isinstance(one, fx.Node) and one in found]
            if known and (is_by_mode(node) or may_be_seen(node) or may_be_operand(node, model)):
                found[node] = known[0]
    return found


def written_buffers(module: fx.GraphModule) -> frozenset[str]:
    """The buffers that the graph writes into, under all of their names."""
    memory, names = memory_of_model(module, module.graph), canonical_names(module)
    written = {
        names.get(memory[node.args[0]])
        for node in module.graph.nodes
        if node.args and node.args[0] in memory and writes_in_place(node, module)
    }
    buffers = (name for name, _ in module.named_buffers(remove_duplicate=False))
    return frozenset(name for name in buffers if names[name] in written)
