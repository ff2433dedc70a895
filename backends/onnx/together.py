"""Many modules in one export, and each one's model cut out of it.

An export takes half a second whatever its size, and DenseNet-121's blocks have 34 structures.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper
from torch import Tensor, nn

from smcp_fx.backends.checking import flatten_outputs
from smcp_fx.backends.onnx.export import export_model_proto
from smcp_fx.errors import BackendError


class Combined(nn.Module):
    """Runs several modules, each on its ``counts`` of the inputs; returns all their outputs as one tuple."""

    def __init__(self, parts: Sequence[nn.Module], counts: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.counts = tuple(counts)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run all."""
        outputs, first = list[Tensor](), 0
        for part, count in zip(self.parts, self.counts, strict=True):
            outputs += flatten_outputs(part(*inputs[first : first + count]))
            first += count
        return tuple(outputs)


def path_of(index: int, path: str) -> str:
    """Return the path in `Combined` of the object at ``path`` in module ``index``."""
    return f"parts.{index}.{path}" if path else f"parts.{index}"


def export_side_by_side(
    modules: Sequence[tuple[nn.Module, tuple[Tensor, ...]]], outputs: Sequence[int], opset: int | None = None
) -> list[onnx.ModelProto]:
    """Return a model of each module on its inputs, from one export; ``outputs``: how many tensors each returns.

    Parameters have the names of `path_of`. `BackendError` if a module cannot be expressed, or the export
    lacks inputs or outputs.
    """
    parts, counts = [module for module, _ in modules], [len(inputs) for _, inputs in modules]
    tensors = tuple(tensor for _, inputs in modules for tensor in inputs)
    whole = export_model_proto(Combined(parts, counts), tensors, opset=opset, dynamic_batch=False)
    ends = list(whole.graph.input), list(whole.graph.output)
    if (len(ends[0]), len(ends[1])) != (sum(counts), sum(outputs)):
        raise BackendError("the export of several modules lacks some of their inputs or outputs")
    models, first, last = [], 0, 0
    for count, returned in zip(counts, outputs, strict=True):
        models.append(_cut_out(whole, ends[0][first : first + count], ends[1][last : last + returned]))
        first, last = first + count, last + returned
    return models


def _cut_out(
    whole: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    """Return the part that computes these outputs as a model of its own."""
    graph = whole.graph
    made_by = {name: index for index, node in enumerate(graph.node) for name in node.output}
    needed, names = set[int](), [value.name for value in outputs]
    while names:
        name = names.pop()
        index = made_by.get(name) if name else None  # an optional input may be left out
        if index is not None and index not in needed:
            needed.add(index)
            names += graph.node[index].input
    nodes = [graph.node[index] for index in sorted(needed)]
    used = {name for node in nodes for name in node.input} | {value.name for value in outputs}
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    own = helper.make_graph(nodes, graph.name, inputs, outputs, weights)
    return helper.make_model(own, opset_imports=list(whole.opset_import), ir_version=whole.ir_version)
