"""Multiply consumers' weights by channel masks inside the graph.

    before   conv1 = call_module[conv1](x)
    after    masked = soft_mask(get_attr[conv1.weight], get_attr[smcp.mask_conv1])
             conv1 = forward_with_weight(get_attr[conv1], masked, x)

Calls that read a weight along the same dimension share its mask. A weight shared by a convolution and a
transposed one has two masks, one for each dimension. (SMCP section 3.1: masks live on input channels.)
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Layer
from smcp_fx.config import MaskMode
from smcp_fx.masking.masks import COMPUTED_MASKS, MASKS
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.other_mode import OtherMode
from smcp_fx.passes.weight_products import insert_product, require_buffer


def mask_name(layer: Layer) -> str:
    """Name of the buffer that holds a layer's mask, in the prepared model's state module."""
    return f"mask_{layer.node}"


def masked_layers(channels: ChannelGraph) -> list[Layer]:
    """Dense layers with at least one input channel that may go, in the order they run.

    Each weight once for each dimension along which it is read.
    """
    layers: dict[tuple[str, int], Layer] = {}
    for layer in channels.layers:
        read = layer.weight, layer.in_dim
        if layer.kind == "dense" and read not in layers and channels.has_choice(layer.in_labels):
            layers[read] = layer
    return list(layers.values())


class InsertSoftMasks(GraphPass):
    """Masks every dense layer that has an input channel with a choice; ``mode`` says how gradients pass."""

    def __init__(self, channels: ChannelGraph, mode: MaskMode = "soft") -> None:
        self.channels = channels
        self.mode = mode

    def requires(self, module: fx.GraphModule) -> None:
        """The module carries a mask buffer for each layer to be masked."""
        for layer in masked_layers(self.channels):
            require_buffer(module, mask_name(layer), self)

    def apply(self, module: fx.GraphModule) -> PassResult:
        nodes = {node.name: node for node in module.graph.nodes}
        uses: dict[tuple[str, int], list[fx.Node]] = defaultdict(list)
        for use in self.channels.layers:
            uses[use.weight, use.in_dim].append(nodes[use.node])
        computed = {nodes[la.node]: nodes[la.read] for la in self.channels.layers if la.read}
        report, other = [], OtherMode(module)
        for layer in masked_layers(self.channels):
            readers = uses[layer.weight, layer.in_dim]
            mask = (COMPUTED_MASKS if layer.computed else MASKS)[self.mode]
            if insert_product(module.graph, readers, layer.weight, mask_name(layer), mask, "mask", computed):
                other.show(readers, layer.weight, mask_name(layer), mask)
                report.append(f"{layer.path}: {layer.in_labels.numel()} input channels masked")
        return PassResult(module, bool(report), tuple(report))
