"""A block in its context, and which part of a profiled run is the block's own.

ONNX Runtime's profiler says how long each node took. The context's nodes are known by name. The runtime
itself names conversions between its blocked layout and the plain one. Conversions of the block's results
belong to the context, which reads them; all others to the block, which needs them in the network too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx

from smcp_fx.backends.base import Array
from smcp_fx.backends.onnx.context import CONTEXT, add_context, random_feed, share_of_channels
from smcp_fx.backends.onnx.twin import add_twin
from smcp_fx.backends.onnxruntime.overhead import add_reference, without_reference
from smcp_fx.backends.onnxruntime.profile import NodeTime
from smcp_fx.backends.onnxruntime.twin import halves, is_twins

#: The conversion from the runtime's blocked layout into the plain one.
CONVERSION = "ReorderOutput"


@dataclass(frozen=True)
class BlockInContext:
    """A block's model in its context, with its twin and a reference chain beside it.

    ``results``: the shapes of the block's own results; ``paid``: the share of its inputs' conversions that does not
    count; ``twin``: whether it has one.
    """

    data: bytes
    feed: dict[str, Array]
    results: tuple[tuple[int, ...], ...]
    paid: float
    twin: bool

    @classmethod
    def of(
        cls,
        model: onnx.ModelProto,
        read_before: Collection[int] = (),
        fed_by: Sequence[str] = (),
        written: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None,
    ) -> BlockInContext:
        """Build it around a block's model, in place. ``read_before`` and ``fed_by``: as for `measure_block`.

        ``written``: quantises a model, if the network is.
        """
        paid = share_of_channels(model, read_before)
        shapes = [value.type.tensor_type.shape.dim for value in model.graph.output]
        results = tuple(tuple(dim.dim_value for dim in shape) for shape in shapes)
        twin = add_twin(add_context(model, fed_by))
        model = written(model) if written is not None else model
        feed = random_feed(add_reference(model))
        return cls(model.SerializeToString(), feed, results, paid, twin)

    def counted(self, nodes: Sequence[NodeTime], state: str) -> tuple[list[list[NodeTime]], int]:
        """Return the parts of a run that count in a state, with their context, and how often each contains the block.

        In the cold state only the second half counts, in the hot state both. If the runtime mixes the halves, they
        are one part.
        """
        nodes = without_reference(nodes)
        parts = halves(nodes) if self.twin else [list(nodes)]
        if parts is None:
            return [list(nodes)], 2
        return (parts[-1:] if state == "cold" else parts), 1

    def ms(self, nodes: Sequence[NodeTime], profiler_ms: float, state: str) -> float:
        """Return the block's ms in one run. ``profiler_ms`` is subtracted from every node."""
        parts, copies = self.counted(nodes, state)
        taken = [block_ms(part, self.results, profiler_ms, self.paid, copies) for part in parts]
        return sum(taken) / (copies * len(parts))


def block_ms(
    nodes: Sequence[NodeTime],
    results: Sequence[tuple[int, ...]],
    profiler_ms: float = 0.0,
    paid: float = 0.0,
    copies: int = 1,
) -> float:
    """Return the ms of the block's `own_nodes` in one run.

    ``profiler_ms`` is subtracted from every node; the share ``paid`` of the inputs' conversions does not count.
    """
    return sum(
        (1 - paid if node.operation == CONVERSION else 1.0) * (node.ms - profiler_ms)
        for node in own_nodes(nodes, results, copies)
    )


def own_nodes(
    nodes: Sequence[NodeTime], results: Sequence[tuple[int, ...]], copies: int = 1
) -> list[NodeTime]:
    """Return a block's nodes in one run, last to first: all but the context and the conversions of its ``results``.

    The runtime converts either a result, for the context to read, or the mean that the context takes of it.
    ``copies``: 2 if the nodes of the block and of its twin ran in turns.
    """
    own, left, seen = list[NodeTime](), copies * list(results), set[bool]()
    for node in reversed(nodes):
        if node.operation == CONVERSION:
            shape = node.output_shapes[0] if node.output_shapes else ()
            result = next((r for r in left if shape in (r, (*r[:2], *(1 for _ in r[2:])))), None)
            if result is None:
                own.append(node)
            else:
                left.remove(result)
        elif CONTEXT not in node.name and not _turns_context(node):
            own.append(node)
            seen.add(is_twins(node))
            if len(results) == 1:  # earlier conversions are of inputs, which may have the result's shape
                del left[copies - len(seen) :]
    return own


def _turns_context(node: NodeTime) -> bool:
    """Whether a node transposes the context's image, of one channel, or the mean that it takes, of one pixel.

    Quantised layers keep channels last. Such conversions have no names of ours.
    """
    return node.operation == "Transpose" and any(shape[-1:] == (1,) for shape in node.output_shapes)
