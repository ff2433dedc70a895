"""Which half of a profiled run is a block's twin (`smcp_fx.backends.onnx.twin`).

Nodes that the runtime inserts have names of its own, so only the order tells the two copies apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from smcp_fx.backends.onnx.twin import TWIN
from smcp_fx.backends.onnxruntime.profile import NodeTime


def is_twins(node: NodeTime) -> bool:
    """Return whether a node belongs to the twin."""
    return TWIN in node.name


def halves(nodes: Sequence[NodeTime]) -> list[list[NodeTime]] | None:
    """Return a run's nodes as two halves, each the other's twin; None if these did not run one after the other."""
    half, odd = divmod(len(nodes), 2)
    parts = [list(nodes[:half]), list(nodes[half:])]
    first, second = (Counter((node.operation, node.output_shapes) for node in part) for part in parts)
    mixed = all(any(is_twins(node) for node in part) for part in parts)
    return None if odd or first != second or mixed else parts
