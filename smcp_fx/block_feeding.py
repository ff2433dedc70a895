"""How the tensors that a block reads were written: what they cost it depends on that.

Runtimes on processors keep what convolutions write in blocks of channels, one vector wide, and fuse some activations
into them. What moves channels about (a concatenation, a split, a shuffle) or scales them one by one (a gate) leaves a
plain layout, which the next convolution has to convert. And an activation that is not fused has read as much as it
wrote, so that of a large tensor only half is in cache when the next layer reads it.

Of EfficientNet-B0 at 64 x 64, batch 32, a depthwise convolution of 96 channels takes 0.5 ms behind a convolution and
1.2 to 1.5 ms behind its SiLU; of DenseNet-121 the conversions behind concatenations are a tenth of the whole.
"""

from __future__ import annotations

from torch import fx
from torch.utils import _pytree as pytree

from smcp_fx.block_signature import MOVES, operation_of
from smcp_fx.channels.trail import TensorInfo
from smcp_fx.tracing import Traced

#: How a tensor was written: by a convolution and what is fused with it, by an activation behind that, or as it lies.
CONVOLUTION, ACTIVATION, MOVEMENT = "convolution", "activation", "movement"

#: What runtimes do not fuse into a convolution, and what leaves everything where it is.
_UNFUSED = {"silu", "gelu", "elu", "hardswish", "mish", "prelu", "softplus", "mul"}
_NOTHING = {"dropout", "identity", "stochasticdepth"}
_JOINING = {"cat", "stack", "hstack", "vstack", "pad"}
#: Elementwise: what reads a plain layout writes one.
_ELEMENTWISE = {"add", "sub", "div", "batchnorm", "relu", "relu6", "leakyrelu", "hardtanh", "clamp",
                "sigmoid", "hardsigmoid", "tanh"} | _UNFUSED  # fmt: skip


def how_written(traced: Traced) -> dict[fx.Node, str]:
    """Return how each node of a traced network writes its tensor, for tensors of four axes: (N, C, H, W)."""
    found: dict[fx.Node, str] = {}
    for node in traced.module.graph.nodes:
        operation = operation_of(traced, node) if node.op.startswith("call_") else None
        shape = _shape(traced, node)
        if operation is None or shape is None:
            continue
        read = [source for source in node.all_input_nodes if _shape(traced, source) is not None]
        ways = [found.get(source, CONVOLUTION) for source in read]
        if operation in _NOTHING and ways:
            found[node] = ways[0]
        elif operation in MOVES | _JOINING or (
            operation in _ELEMENTWISE
            and (MOVEMENT in ways or any(_shape(traced, source) != shape for source in read))
        ):
            found[node] = MOVEMENT
        elif operation in _UNFUSED:
            found[node] = ACTIVATION
        else:
            found[node] = CONVOLUTION
    return found


def gated(traced: Traced, how: dict[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Return the tensors that are scaled channel by channel, each with the node that does it.

    A gate reads a plain layout whatever the widths are. So it pays for the conversion, and not the mean before it,
    which reads a plain layout where it has to.
    """
    found = {}
    for node, way in how.items():
        if way == MOVEMENT and operation_of(traced, node) == "mul":
            shape = _shape(traced, node)
            found.update({s: node for s in node.all_input_nodes if _shape(traced, s) == shape})
    return found


def _shape(traced: Traced, node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor, None where that has not four axes."""
    for value in pytree.tree_leaves(traced.values[node.name]):
        if isinstance(value, TensorInfo) and len(value.shape) == 4:
            return tuple(value.shape)
    return None
