"""Restore the plain form of operations that mix channels: the inverse of `InsertKeptStatistics`.

They then read every channel. Once the others are sliced away, they compute the same as with masks.
"""

from __future__ import annotations

from torch import fx

from smcp_fx.errors import PassError
from smcp_fx.masking.kept_statistics import BEFORE, as_it_was
from smcp_fx.masking.masks import META, mark_of
from smcp_fx.passes.base import GraphPass, PassResult


class FoldKeptStatistics(GraphPass):
    """Takes the masks away from norms, statistics and products over channels."""

    def apply(self, module: fx.GraphModule) -> PassResult:
        report = []
        graph = module.graph
        for node in list(graph.nodes):
            mark = mark_of(node)
            if node.op == "call_function" and node.target in BEFORE.values():
                source, mask = node.args[:2]
                copied = isinstance(source, fx.Node) and source.target is as_it_was
                node.replace_all_uses_with(source.args[0] if copied else source)
                graph.erase_node(node)
                dropped = [mask, source] if copied else [mask]
            elif mark is not None and mark.kind == "kept":
                first = int(mark.path is not None)  # a module's call reads the module, too
                dropped = list(node.args[: first + 1])
                assert mark.call is not None
                node.op, node.target = mark.call
                node.args = node.args[first + 1 :]
                del node.meta[META]
            else:
                continue
            for read in dropped:
                if isinstance(read, fx.Node) and not read.users:
                    graph.erase_node(read)
            report.append(f"{node.name}: sees every channel")
        return PassResult(module, bool(report), tuple(report))

    def ensures(self, module: fx.GraphModule) -> None:
        if any(node.target in BEFORE.values() for node in module.graph.nodes):
            raise PassError(f"{self.name} left a mask in the graph")
