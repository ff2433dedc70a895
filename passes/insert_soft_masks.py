"""Multiply consumers' weights by channel masks inside the graph.

    before   conv1 = call_module[conv1](x)
    after    masked = soft_mask(get_attr[conv1.weight], get_attr[smcp.mask_conv1])
             conv1 = forward_with_weight(get_attr[conv1], masked, x)

A weight that several calls share is masked once. (SMCP section 3.1: masks live on input channels.)
"""

from __future__ import annotations

from torch import fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.propagation import Layer
from smcp_fx.errors import PassError
from smcp_fx.masking import MASKS, META, STATE, Mark, MaskMode, forward_with_weight, mark_of
from smcp_fx.passes.base import GraphPass, PassResult


def mask_name(layer: Layer) -> str:
    """Name of the buffer that holds a layer's mask, in the prepared model's state module."""
    return f"mask_{layer.node}"


def masked_layers(channels: ChannelGraph) -> list[Layer]:
    """Dense layers with at least one input channel that may go, each weight once, in the order they run."""
    found: dict[str, Layer] = {}
    for layer in channels.layers:
        if layer.kind == "dense" and layer.weight not in found and channels.has_choice(layer.in_labels):
            found[layer.weight] = layer
    return list(found.values())


class InsertSoftMasks(GraphPass):
    """Masks every dense layer that has an input channel with a choice; ``mode`` says how gradients pass."""

    def __init__(self, channels: ChannelGraph, mode: MaskMode = "soft") -> None:
        self.channels = channels
        self.mask = MASKS[mode]

    def requires(self, module: fx.GraphModule) -> None:
        """The module carries a mask buffer for each layer to be masked."""
        for layer in masked_layers(self.channels):
            if not hasattr(module.get_submodule(STATE), mask_name(layer)):
                raise PassError(f"{self.name}: the module has no buffer {STATE}.{mask_name(layer)}")

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Insert the nodes."""
        nodes = {node.name: node for node in module.graph.nodes}
        report = []
        modified = False
        for layer in masked_layers(self.channels):
            uses = [nodes[use.node] for use in self.channels.layers if use.weight == layer.weight]
            if mark_of(uses[0]) is not None:
                continue
            modified = True
            graph = module.graph
            with graph.inserting_before(uses[0]):
                weight = _weight_of(uses[0]) or graph.create_node("get_attr", layer.weight)
                mask = graph.create_node("get_attr", f"{STATE}.{mask_name(layer)}")
                masked = graph.call_function(self.mask, (weight, mask))
            for use in uses:
                _redirect(graph, use, masked)
            report.append(f"{layer.path}: {layer.in_labels.numel()} input channels masked")
        return PassResult(module, modified, tuple(report))


def _weight_of(use: fx.Node) -> fx.Node | None:
    """The node that reads the weight of a functional call; None for a module's call."""
    if use.op == "call_module":
        return None
    weight = use.args[1] if len(use.args) > 1 else use.kwargs["weight"]
    assert isinstance(weight, fx.Node)
    return weight


def _redirect(graph: fx.Graph, use: fx.Node, masked: fx.Node) -> None:
    if use.op == "call_module":
        path = str(use.target)
        with graph.inserting_before(use):
            owner = graph.create_node("get_attr", path)
        use.op, use.target = "call_function", forward_with_weight
        use.args = (owner, masked, *use.args)
        use.meta[META] = Mark("mask", path)
    else:
        original = _weight_of(use)
        assert original is not None
        use.replace_input_with(original, masked)
        if not original.users:
            graph.erase_node(original)
        use.meta[META] = Mark("mask", None)
