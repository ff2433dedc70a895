"""What tracing assumed of the shapes is asserted in the graph; the channel rules need not see it."""

from __future__ import annotations

import torch
from torch import fx


def only_asserted(graph: fx.Graph) -> set[str]:
    """Nodes that only an assertion reads: it asks of the channels that are left what it asked of all."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        read = bool(node.users) and all(user.name in found for user in node.users)
        if node.target is torch._assert or (read and node.op in ("call_function", "call_method")):
            found.add(node.name)
    return found
