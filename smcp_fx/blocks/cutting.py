"""Cut a network into blocks that an engine runs as one; a latency table has rows for each.

A block is a convolution or linear with what engines fuse into it (padding, batch norm, activations, an addition), a
concatenation with the batch norm and activation after it, or one other operation that costs time. It has at most two
free widths: the channels it reads and does not pass on, and those it passes on. It can be built at any widths with
random weights, by the same slicing that makes the final model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import dropwhile

from torch import fx

from smcp_fx.blocks.feeding import gated, how_written
from smcp_fx.blocks.fused import FusedBlock
from smcp_fx.blocks.loaded import computes, holds_tensors, loaded, reached
from smcp_fx.blocks.making import make_block
from smcp_fx.blocks.signature import MOVES, PADS
from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.mixed_weights import fold
from smcp_fx.channels.weight_views import is_layer, weight_and_bias
from smcp_fx.tracing.modes import evaluated_graph, with_branches
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.recurrent import recurrent, recurrent_weight
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import TensorInfo

#: Operations that begin a block and absorb others, those that absorb the padding before them, and those absorbed.
_ANCHORS = {f"conv{kind}{rank}d" for kind in ("", "transpose") for rank in (1, 2, 3)} | {"linear"}
_PADDED = PADS | {f"{kind}{rank}d" for kind in ("conv", "maxpool", "avgpool") for rank in (1, 2, 3)}
_FOLLOWERS = set(
    """
batchnorm add mul dropout identity stochasticdepth relu relu6 leakyrelu hardtanh clamp sigmoid
hardsigmoid hardswish silu gelu elu tanh prelu
""".split()
)


def cut(traced: Traced, channels: ChannelGraph) -> list[FusedBlock]:
    """Cut a traced network, as it runs in eval mode, into blocks.

    Every operation on tensors is in exactly one block, except operations on parameters alone (computed
    weights, expanded tokens): engines compute these on loading, so each block that reads one contains it.
    """
    graph = _with_single_inputs(evaluated_graph(traced.module.graph), traced)
    traced = replace(traced, module=fx.GraphModule(traced.module, graph))
    how, dynamic = how_written(traced), reached(traced, channels)
    gates = gated(traced, how)
    read_by_concatenations: set[fx.Node] = set()
    blocks: list[FusedBlock] = []
    tried: dict[str, str] = {}
    for nodes in _fused(traced, channels, dynamic):
        first = next(iter(_unpadded(traced, nodes)), None)
        if first == "cat":
            converted = set(read_by_concatenations)
            read_by_concatenations.update(nodes[0].all_input_nodes)
        elif first in _ANCHORS:
            converted = set()
        else:
            converted = {source for source, gate in gates.items() if gate not in nodes}
        before = loaded(traced, nodes, dynamic)
        blocks.append(make_block(traced, channels, nodes, converted, how, before, tried))
    return blocks


def _with_single_inputs(graph: fx.Graph, traced: Traced) -> fx.Graph:
    """Return the graph with an input for each tensor that it takes out of an input list, tuple or dict."""
    made, parts, copied = fx.Graph(), set[fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        single = isinstance(traced.values.get(node.name), TensorInfo)
        taken = node.op.startswith("call") and node.all_input_nodes and parts.issuperset(node.all_input_nodes)
        if node.op == "placeholder" or (taken and holds_tensors(traced, node)):
            if not single:
                parts.add(node)
            elif taken:
                copied[node] = made.placeholder(node.name)
                continue
        copied[node] = made.node_copy(node, copied.__getitem__)
    for part in reversed([copied[node] for node in graph.nodes if node in parts]):
        if part.op != "placeholder" and not part.users:  # for instance a dict in a dict
            made.erase_node(part)
    return with_branches(made) if parts else graph


def _fused(traced: Traced, channels: ChannelGraph, dynamic: set[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes that run as one, block by block."""
    blocks: list[list[fx.Node]] = []
    home: dict[fx.Node, int] = {}
    trail = channels.trail
    crossed = trail.blocks.keys() | trail.mixed.keys() | trail.virtual | _folds(traced, channels)
    for node in traced.module.graph.nodes:
        if not computes(traced, node) or node not in dynamic or node.target is recurrent_weight:
            continue
        operation = operation_of(traced.module, node)
        # The reader of a matrix of channels by channels (such as a mixture of kernels), or of a tensor inside
        # a shuffle, joins its maker's block: a block's inputs have one dimension of channels.
        matrices = [source for source in node.all_input_nodes if source in home and source.name in crossed]
        target = home[matrices[0]] if matrices else None
        for other in {home[source] for source in matrices} - {target}:
            home.update((inner, home[matrices[0]]) for inner in blocks[other])
            blocks[home[matrices[0]]] += blocks[other]
            blocks[other] = []
        # Else the node joins the latest block that ends in one of its operands: engines fuse an addition into the
        # convolution that runs last before it.
        sources = [source for source in node.all_input_nodes if source in home and not matrices]
        for source in sorted(sources, key=lambda n: -home[n]):
            block = blocks[home[source]]
            if not isinstance(traced.values[source.name], TensorInfo):
                target = home[source]  # one of several outputs belongs to the operation that made them
                break
            alone = block[-1] is source and _tensor_users(traced, source) == 1
            if alone and _joins(traced, block, operation):
                target = home[source]
                break
        if target is None:
            target = len(blocks)
            blocks.append([])
        if node.target is recurrent:  # one operation with its weights
            blocks[target] += [read for read in node.all_input_nodes if read.target is recurrent_weight]
        blocks[target].append(node)
        home[node] = target
    return [block for block in blocks if block]


def _folds(traced: Traced, channels: ChannelGraph) -> set[str]:
    """Return the nodes that fold a batch into one image, to convolve each image with its own weight."""
    names: set[str] = set()
    for use in traced.module.graph.nodes:
        weight = weight_and_bias(use)[0] if is_layer(use) else None
        if not (isinstance(weight, fx.Node) and weight.name in channels.trail.mixed):
            continue
        path = fold(traced.module, use, traced.values)
        if path and traced.values[path[-1].all_input_nodes[0].name].shape[0] > 1:
            names.update(node.name for node in path)
    return names


def _joins(traced: Traced, block: list[fx.Node], operation: str | None) -> bool:
    """Whether an operation that only reads a block's result is fused into it."""
    operations = _unpadded(traced, block)
    if not operations:
        return operation in _PADDED
    if all(name in MOVES for name in operations):
        return operation in MOVES or operation == "linear"
    if operations[0] == "cat":
        # The followers read the layout that the concatenation writes, which depends on its inputs' widths.
        return operation in _FOLLOWERS - {"add", "mul"}
    return operation in _FOLLOWERS and (operations[0] in _ANCHORS | _FOLLOWERS or "linear" in operations)


def _unpadded(traced: Traced, block: list[fx.Node]) -> list[str | None]:
    """Return a block's operations without the padding of an image that it begins with."""
    kept = dropwhile(partial(_pads, traced), block)
    return [operation_of(traced.module, node) for node in kept]


def _pads(traced: Traced, node: fx.Node) -> bool:
    """Whether a node pads images and leaves their channels."""
    if operation_of(traced.module, node) not in PADS:
        return False
    before, after = (traced.values[one.name].shape for one in (node.all_input_nodes[0], node))
    return len(after) > 2 and before[:2] == after[:2]


def _tensor_users(traced: Traced, node: fx.Node) -> int:
    return sum(user.op == "output" or computes(traced, user) for user in node.users)
