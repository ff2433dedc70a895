"""A block's twin: the same nodes with weights of its own, in the same session.

After the caches were emptied, a block that runs alone pays for more than its weights. The memory for its results, the
kernels' code and the profiler are cold as well; in a network the layers before have just used them. (The blocks of a
ShuffleNetV2 at 64 x 64 that runs from memory added up to 1.96 ms, while the network took 1.18.) The twin has the same
nodes of the same sizes and runs first, so it pays for all that. Then only the block's own data is still cold.

The twin's weights have different values. ONNX Runtime 1.32 keeps one copy of two equal weights, so that the second
layer would find its weights in cache (3.7 MiB of a linear layer took 55 µs after emptying the caches instead of 175).

In the hot state both count: the first copy's kernels were displaced, the second's have just run, and a network's
nodes are in between.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

#: Suffix of a twin's names (a prefix tells context from block).
TWIN = "_smcp_twin"
#: Blocks with more bytes of weights get no twin: other cold data costs little beside them. Chosen.
_MOST_BYTES = 4 << 20
#: Tensors with at most this many numbers keep their values, as they may be scales or bounds. Chosen, not
#: measured.
_SMALL = 64


def add_twin(model: onnx.ModelProto) -> bool:
    """Put a copy of all nodes, inputs and outputs, with other weights, before the model's own, in place.

    Returns False and does nothing if there are too many weights to copy, or a node holds a graph of its own.
    """
    graph = model.graph
    if sum(len(tensor.raw_data) for tensor in graph.initializer) > _MOST_BYTES:
        return False
    if any(attribute.HasField("g") for node in graph.node for attribute in node.attribute):
        return False
    twin = onnx.GraphProto()
    twin.CopyFrom(graph)
    for node in twin.node:
        node.name += TWIN
        for names in (node.input, node.output):
            names[:] = [name and name + TWIN for name in names]
    for tensor in twin.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and values.size > _SMALL:
            tensor.CopyFrom(numpy_helper.from_array(np.roll(values, 1), tensor.name))
    for named in (*twin.initializer, *twin.input, *twin.output, *twin.value_info):
        named.name += TWIN
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*twin.node, *own])
    graph.initializer.extend(twin.initializer)
    graph.value_info.extend(twin.value_info)
    graph.input.extend(twin.input)
    graph.output.extend(twin.output)
    return True
