"""Restrict operations that mix channels to the kept ones.

    before   norm = call_module[norm](x);  total = x.mean(1)
    after    norm = module_over_kept(get_attr[norm], get_attr[smcp.kept_norm], x)
             total = mean_kept(x, get_attr[smcp.kept_total]).mean(1)

Norms, statistics and products over channels read the channels themselves, which consumers' masks do not change. If
all channels are kept, they compute the same as before.
"""

from __future__ import annotations

from torch import fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Mix
from smcp_fx.masking.kept_statistics import BEFORE, IN_PLACE_OF, as_it_was, module_over_kept
from smcp_fx.masking.masks import META, STATE, Mark, mark_of
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.weight_products import require_buffer
from smcp_fx.tracing.aliases import origins
from smcp_fx.tracing.operations import operation_name, writes_in_place


def kept_name(mix: Mix) -> str:
    """Name of the buffer that holds the mask of a mix's operand, in the prepared model's state module."""
    return f"kept_{mix.node}" + (f"_{mix.operand}" if mix.operand else "")


def masked_mixes(channels: ChannelGraph) -> list[Mix]:
    """Operations that mix a channel with a choice, in the order they run."""
    return [mix for mix in channels.trail.mixes if channels.has_choice(mix.labels)]


def scored_mixes(channels: ChannelGraph) -> list[Mix]:
    """Masked mixes whose mask gradients measure the worth of channels that no layer reads (queries, keys)."""
    unread = channels.free_units & ~channels.read
    return [
        mix
        for mix in masked_mixes(channels)
        if mix.scores and bool(unread[channels.units.among([mix.labels])].any())
    ]


class InsertKeptStatistics(GraphPass):
    """Gives every operation that mixes channels with a choice the mask of these channels."""

    def __init__(self, channels: ChannelGraph) -> None:
        self.channels = channels

    def requires(self, module: fx.GraphModule) -> None:
        """The module carries a mask buffer for each masked operation."""
        for mix in masked_mixes(self.channels):
            require_buffer(module, kept_name(mix), self)

    def apply(self, module: fx.GraphModule) -> PassResult:
        nodes = {node.name: node for node in module.graph.nodes}
        scored = {kept_name(mix) for mix in scored_mixes(self.channels)}
        report = []
        for mix in masked_mixes(self.channels):
            node = nodes[mix.node]
            mark, operand = mark_of(node), mix.operand
            if mark is not None and mark.kind == "mask":
                operand += 2 * (mark.path is not None)  # behind the module, and its masked weight
            elif mark is not None:
                continue
            if _is_before(node.args[operand]):
                continue
            with module.graph.inserting_before(node):
                mask = module.graph.create_node("get_attr", f"{STATE}.{kept_name(mix)}")
            if mix.form == "instead":
                _put_instead(module, node, mask)
            else:
                if kept_name(mix) in scored and _is_overwritten(module, node, node.args[operand]):
                    with module.graph.inserting_before(node):
                        node.update_arg(operand, module.graph.call_function(as_it_was, (node.args[operand],)))
                _put_before(module.graph, node, mask, mix, operand)
            report.append(f"{mix.node}: {mix.labels.numel()} channels masked")
        return PassResult(module, bool(report), tuple(report))


def _is_before(operand: object) -> bool:
    return isinstance(operand, fx.Node) and operand.target in BEFORE.values()


def _is_overwritten(module: fx.GraphModule, reader: fx.Node, operand: object) -> bool:
    """Does a later operation overwrite the operand, whose old values the mask's gradient needs?"""
    memory, later = origins(operand, module), False
    for node in module.graph.nodes:
        if later and writes_in_place(node, module) and not memory.isdisjoint(origins(node.args[0], module)):
            return True
        later |= node is reader
    return False


def _put_before(graph: fx.Graph, node: fx.Node, mask: fx.Node, mix: Mix, operand: int) -> None:
    with graph.inserting_before(node):
        masked = graph.call_function(BEFORE[mix.form], (node.args[operand], mask, *mix.options))
    node.update_arg(operand, masked)


def _put_instead(module: fx.GraphModule, node: fx.Node, mask: fx.Node) -> None:
    mark = Mark("kept", str(node.target) if node.op == "call_module" else None, (node.op, node.target))
    if node.op == "call_module":
        with module.graph.inserting_before(node):
            owner = module.graph.create_node("get_attr", str(node.target))
        node.target, node.args = module_over_kept, (owner, mask, *node.args)
    else:
        node.target, node.args = IN_PLACE_OF[operation_name(node, None) or ""], (mask, *node.args)
    node.op = "call_function"
    node.meta[META] = mark
