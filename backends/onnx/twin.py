"""A block's twin, of weights of its own, that runs with it in the same session.

After the caches were emptied, a block that runs alone pays for more than its weights. The memory that its results go
to, the kernels' code and the profiler are cold as well; in a network the layers before have just used them. (For a
ShuffleNetV2 at 64 x 64 that runs from memory the blocks added up to 1.96 ms, and the network took 1.18.) The twin has
the same nodes at the same sizes and runs first. It pays for all that; what is still cold for the block is its own.

The twin's weights have other values: of two equal weights ONNX Runtime 1.32 keeps one copy, so the second layer would
find its weights in cache (3.7 MiB of a linear layer took 55 µs behind emptied caches instead of 175).

Hot, both count: the first runs kernels that were displaced, the second kernels that have just run, and a network's
nodes are in between.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

#: Ends a twin's names (beginnings tell context from block).
TWIN = "_smcp_twin"
#: Blocks with more bytes of weights get no twin: what else is cold costs little beside those. Chosen, not measured.
_MOST_BYTES = 4 << 20
#: Tensors with at most so many numbers keep their values: they may be scales and bounds.
_SMALL = 64


def add_twin(model: onnx.ModelProto) -> bool:
    """Put a copy of all nodes, inputs and outputs, with other weights, in front of the model's own, in place.

    False, and nothing done, where the weights are too many to copy, or a node holds a graph of its own.
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
