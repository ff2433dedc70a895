"""How the tensors that a block reads are written, which affects the cost of reading them.

On CPUs, runtimes store the results of convolutions in blocks of channels, one vector wide, and fuse some activations
into convolutions. Operations that move channels (concatenation, split, shuffle) or scale them one by one (a gate)
write a plain layout, which the next convolution must convert. An activation that is not fused reads as much as it
writes, so that only half of a large tensor is in cache when the next layer reads it.

In EfficientNet-B0 at 64 x 64, batch 32, a depthwise convolution of 96 channels takes 0.5 ms after a convolution and
1.2 to 1.5 ms after a SiLU. Norms and conversions after concatenations are an eighth of a pruned DenseNet-121.
"""

from __future__ import annotations

from torch import fx
from torch.utils import _pytree as pytree

from smcp_fx.blocks.signature import MOVES
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import TensorInfo

#: How a tensor is written: by a convolution with what is fused into it, by an activation after one, or in a plain
#: layout.
CONVOLUTION, ACTIVATION, MOVEMENT = "convolution", "activation", "movement"

#: Operations that runtimes compute in a convolution's layout but do not fuse, and those they compute in a plain
#: layout only.
_UNFUSED = {"silu", "gelu", "hardswish", "mul"}
_PLAIN = {"elu", "mish", "prelu", "softplus", "groupnorm", "instancenorm", "layernorm", "cat", "stack", "hstack",
          "vstack"} | {f"convtranspose{rank}d" for rank in (1, 2, 3)}  # fmt: skip
#: Operations that cost nothing; zeros around an image become the padding of the next convolution or pooling.
_NOTHING = {"dropout", "dropout2d", "featuredropout", "identity", "stochasticdepth", "contiguous", "detach", "to",
            "clone", "pad", "zeropad2d"}  # fmt: skip
#: Elementwise operations: they write the layout that they read.
_ELEMENTWISE = {"add", "sub", "div", "batchnorm", "relu", "relu6", "leakyrelu", "hardtanh", "clamp",
                "sigmoid", "hardsigmoid", "tanh"} | _UNFUSED  # fmt: skip


def how_written(traced: Traced) -> dict[fx.Node, str]:
    """Return how each node of a traced network writes its tensor, for tensors [N, C, H, W]."""
    ways_of: dict[fx.Node, str] = {}
    parameters = _parameters(traced)
    for node in traced.module.graph.nodes:
        operation = operation_of(traced.module, node) if node.op.startswith("call_") else None
        shape = _shape(traced, node)
        if operation is None or shape is None:
            continue
        read = _read(traced, node, parameters)
        ways = [ways_of.get(source, CONVOLUTION) for source in read]
        if operation in _NOTHING and ways:
            ways_of[node] = ways[0]
        elif operation in MOVES | _PLAIN or (
            operation in _ELEMENTWISE
            and (MOVEMENT in ways or any(_shape(traced, source) != shape for source in read))
        ):
            ways_of[node] = MOVEMENT
        elif operation in _UNFUSED and (
            operation != "mul" or len(read) > 1
        ):  # a product with a number is folded
            ways_of[node] = ACTIVATION
        else:
            ways_of[node] = CONVOLUTION
    return ways_of


def gated(traced: Traced, how: dict[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Return the tensors that are scaled channel by channel, each with the node that scales it (the gate).

    A gate reads a plain layout at any width. So the gate pays for the conversion, not the mean before it, which can
    read either layout.
    """
    gates = {}
    parameters = _parameters(traced)
    for node, way in how.items():
        if way == MOVEMENT and operation_of(traced.module, node) == "mul":
            shape = _shape(traced, node)
            read = _read(traced, node, parameters)
            if any(_shape(traced, source) != shape for source in read):
                gates.update({source: node for source in read if _shape(traced, source) == shape})
    return gates


def _parameters(traced: Traced) -> set[fx.Node]:
    """Return the parameters, and what follows from them alone."""
    nodes: set[fx.Node] = set()
    for node in traced.module.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr" or (node.op.startswith("call_") and sources and nodes.issuperset(sources)):
            nodes.add(node)
    return nodes


def _read(traced: Traced, node: fx.Node, parameters: set[fx.Node]) -> list[fx.Node]:
    """Return the four-axis tensors that a node reads, without parameters, which engines fold."""
    return [
        source
        for source in node.all_input_nodes
        if _shape(traced, source) is not None and source not in parameters
    ]


def _shape(traced: Traced, node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor; None unless it has four axes."""
    for value in pytree.tree_leaves(traced.values[node.name]):
        if isinstance(value, TensorInfo) and len(value.shape) == 4:
            return tuple(value.shape)
    return None
