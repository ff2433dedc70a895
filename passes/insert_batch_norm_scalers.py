"""Scale the weight of each batch norm by the share of input channels its convolution keeps.

    before   bn1 = call_module[bn1](conv1)
    after    scaled = scale_gamma(get_attr[bn1.weight], get_attr[smcp.scale_bn1])
             bn1 = forward_with_weight(get_attr[bn1], scaled, conv1)

(SMCP section 3.2, eq. 4.) The unscaled weight stays the parameter that is optimised.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.trail import Layer, Norm
from smcp_fx.config import GammaGradient
from smcp_fx.masking.masks import SCALES
from smcp_fx.passes.base import GraphPass, PassResult
from smcp_fx.passes.other_mode import OtherMode
from smcp_fx.passes.weight_products import insert_product, require_buffer


def scale_name(norm: Norm) -> str:
    """Name of the buffer that holds a batch norm's scale, in the prepared model's state module."""
    return f"scale_{norm.node}"


def weight_of(use: fx.Node) -> fx.Node:
    """The argument of `F.batch_norm` that is the weight."""
    given = use.kwargs["weight"] if "weight" in use.kwargs else use.args[3]
    assert isinstance(given, fx.Node)
    return given


def norm_sources(channels: ChannelGraph, norm: Norm) -> tuple[list[Layer], Tensor]:
    """The dense layers that wrote a batch norm's channels, and for each channel its layer's index, or -1.

    After a concat there are several layers. Channels that passed an addition, a depthwise convolution or
    another batch norm have none.
    """
    writer = torch.where(norm.labels > 0, channels.layer_of_label[norm.labels.clamp(min=0)], -1)
    indices, source = torch.unique(writer, return_inverse=True)
    if indices.numel() and int(indices[0]) < 0:
        indices, source = indices[1:], source - 1
    layers = [channels.layers[index] for index in indices.tolist()]
    return layers, source


def scaled_norms(channels: ChannelGraph) -> list[Norm]:
    """Batch norms with a channel whose convolution has an input channel with a choice, each module once."""
    norms: dict[str, Norm] = {}
    for norm in channels.norms:
        if norm.path not in norms and any(
            channels.has_choice(layer.in_labels) for layer in norm_sources(channels, norm)[0]
        ):
            norms[norm.path] = norm
    return list(norms.values())


class InsertBatchNormScalers(GraphPass):
    """Scales every affine batch norm behind a masked convolution; ``gradient`` sets its weight's gradient."""

    def __init__(self, channels: ChannelGraph, gradient: GammaGradient = "chain") -> None:
        self.channels = channels
        self.scale = SCALES[gradient]

    def requires(self, module: fx.GraphModule) -> None:
        """The module carries a scale buffer for each batch norm to be scaled."""
        for norm in scaled_norms(self.channels):
            require_buffer(module, scale_name(norm), self)

    def apply(self, module: fx.GraphModule) -> PassResult:
        nodes = {node.name: node for node in module.graph.nodes}
        uses: dict[str, list[fx.Node]] = defaultdict(list)
        for use in self.channels.norms:
            uses[use.path].append(nodes[use.node])
        report, other = [], OtherMode(module)
        modified = False
        for norm in scaled_norms(self.channels):
            if not norm.weight:
                report.append(f"{norm.path}: has no weight to scale")
                continue
            calls, name = uses[norm.path], scale_name(norm)
            read = {use: weight_of(use) for use in calls if use.target is F.batch_norm}
            if insert_product(module.graph, calls, norm.weight, name, self.scale, "scale", read):
                modified = True
                other.show(calls, norm.weight, name, self.scale)
                report.append(f"{norm.path}: {norm.labels.numel()} channels scaled")
        return PassResult(module, modified, tuple(report))
