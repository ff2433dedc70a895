"""Values that follow from parameters or sizes alone: engines compute them when they load a network."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.labels import varied_dims
from smcp_fx.passes.sliced_labels import Sliced
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import TensorInfo

#: Operations that read no more of a tensor than its size and type.
_OF_SIZES = frozenset("newempty newfull newones newzeros emptylike fulllike oneslike zeroslike".split())


def holds_tensors(traced: Traced, node: fx.Node) -> bool:
    """Whether a node returns a tensor, or a collection with tensors in it."""
    return any(isinstance(v, TensorInfo) for v in pytree.tree_leaves(traced.values.get(node.name)))


def computes(traced: Traced, node: fx.Node) -> bool:
    """Whether a node is an operation that returns tensors."""
    return node.op in ("call_function", "call_method", "call_module") and holds_tensors(traced, node)


def reached(traced: Traced, channels: ChannelGraph) -> set[fx.Node]:
    """Return the nodes whose tensors depend on the values of an input. Sizes do not: files fix them."""
    nodes: set[fx.Node] = set()
    for node in traced.module.graph.nodes:
        follows = bool(nodes & set(node.all_input_nodes)) and not _of_sizes(traced, channels, node)
        if (node.op == "placeholder" or follows) and holds_tensors(traced, node):
            nodes.add(node)
    return nodes


def _of_sizes(traced: Traced, channels: ChannelGraph, node: fx.Node) -> bool:
    """Whether a node reads sizes only and returns no channels (a result with channels follows its source)."""
    if operation_of(traced.module, node) not in _OF_SIZES:
        return False
    labels = channels.trail.labels.get(node.name)
    return not (isinstance(labels, Tensor) and varied_dims(channels.units.of(labels)))


def loaded(traced: Traced, nodes: list[fx.Node], reached: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes that these nodes read and that depend on no input, in order."""
    sources: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in reached and source not in sources and computes(traced, source):
                sources.add(source)
                waiting.append(source)
    return [node for node in traced.module.graph.nodes if node in sources - set(nodes)]


@torch.no_grad()
def load(module: fx.GraphModule, sliced: Sliced) -> None:
    """Compute a block's values that depend on no input, as an engine does; keep them as buffers, in place.

    A block has the network's sizes as numbers. If these make a value too wide, only its kept channels stay.
    """
    labels = sliced.channels.trail.labels
    values: dict[fx.Node, Tensor] = {}
    interpreter = fx.Interpreter(module)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output") or any(
            n not in interpreter.env for n in node.all_input_nodes
        ):
            continue
        interpreter.env[node] = interpreter.run_node(node)
        if node.op != "get_attr" and isinstance(interpreter.env[node], Tensor):
            values[node] = interpreter.env[node]
    for node, value in values.items():
        if all(user in interpreter.env for user in node.users):
            continue  # only an intermediate value
        name = f"loaded_{node.name}"
        kept = sliced.axis(labels[node.name]) if isinstance(labels.get(node.name), Tensor) else None
        if kept is not None and value.shape[kept[0]] > kept[1].numel():
            value = value.index_select(*kept)
        module.register_buffer(name, value.detach().clone())
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(name))
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
