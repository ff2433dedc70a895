"""Views that are written into: slicing may turn a view into a copy, and the write would be lost.

y = x.view(n, 2, -1); y += 1; return x     x and y keep their channels
x[:, 4:8] += 1; return x                   free: a plain slice stays a view
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

from torch import fx

from smcp_fx.tracing.aliases import sources
from smcp_fx.tracing.operations import operation_of, writes_in_place
from smcp_fx.tracing.traits import Trait, has


def written_views(module: fx.GraphModule, write: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    """The views and bases whose channels must stay because this node writes into them, with the reason."""
    if not writes_in_place(write, module):
        return
    for path in _written(module, write):
        moved = shared = False
        for view, source in itertools.pairwise(path[1:]):
            moved |= has(operation_of(module, view), Trait.MOVES) and not _is_plain_slice(view)
            shared |= moved and any(user not in (view, write) for user in source.users)
        for node in (path[1], path[-1]) if shared else ():
            yield node, f"{write.name!r} writes into a view of {path[-1].name!r}"


def _written(module: fx.GraphModule, node: fx.Node, first: bool = True) -> list[list[fx.Node]]:
    """Paths back from a write to the tensors whose memory it may change; each begins with the node itself."""
    before = node.args[:1] if first else sources(node, module)
    paths = [_written(module, source, False) for source in before if isinstance(source, fx.Node)]
    return [[node, *path] for each in paths for path in each] or [[node]]


def _is_plain_slice(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(part is Ellipsis or (isinstance(part, slice) and part.step is None) for part in index)
