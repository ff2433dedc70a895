"""Scale the weight of each batch norm by the share of input channels its convolution keeps.

    before   bn1 = call_module[bn1](conv1)
    after    scaled = scale_gamma(get_attr[bn1.weight], get_attr[smcp.scale_bn1])
             bn1 = forward_with_weight(get_attr[bn1], scaled, conv1)

(SMCP section 3.2, eq. 4.) The unscaled weight stays the parameter that is optimised.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.propagation import Layer, Norm
from smcp_fx.errors import PassError
from smcp_fx.masking import META, SCALES, STATE, GammaGradient, Mark, forward_with_weight, mark_of
from smcp_fx.passes.base import GraphPass, PassResult


def scale_name(norm: Norm) -> str:
    """Name of the buffer that holds a batch norm's scale, in the prepared model's state module."""
    return f"scale_{norm.node}"


def norm_sources(channels: ChannelGraph, norm: Norm) -> tuple[list[Layer], Tensor]:
    """Which dense layer wrote each channel of a batch norm: the layers, and their index a channel, -1 for none.

    After a concat there are several; what went through an addition, a depthwise convolution or another batch
    norm on the way has none.
    """
    layers = [
        layer
        for layer in channels.layers
        if layer.kind == "dense" and bool(torch.isin(norm.labels, layer.output_channels).any())
    ]
    source = torch.full((norm.labels.numel(),), -1, dtype=torch.int64)
    for index, layer in enumerate(layers):
        source[torch.isin(norm.labels, layer.output_channels)] = index
    return layers, source


def scaled_norms(channels: ChannelGraph) -> list[Norm]:
    """Batch norms with a channel whose convolution has an input channel with a choice, each module once."""
    found: dict[str, Norm] = {}
    for norm in channels.norms:
        if norm.path not in found and any(
            channels.has_choice(layer.in_labels) for layer in norm_sources(channels, norm)[0]
        ):
            found[norm.path] = norm
    return list(found.values())


class InsertBatchNormScalers(GraphPass):
    """Scales every affine batch norm behind a masked convolution; ``gradient`` says what its weight gets."""

    def __init__(self, channels: ChannelGraph, gradient: GammaGradient = "chain") -> None:
        self.channels = channels
        self.scale = SCALES[gradient]

    def requires(self, module: fx.GraphModule) -> None:
        """The module carries a scale buffer for each batch norm to be scaled."""
        for norm in scaled_norms(self.channels):
            if not hasattr(module.get_submodule(STATE), scale_name(norm)):
                raise PassError(f"{self.name}: the module has no buffer {STATE}.{scale_name(norm)}")

    def apply(self, module: fx.GraphModule) -> PassResult:
        """Insert the nodes."""
        nodes = {node.name: node for node in module.graph.nodes}
        report = []
        modified = False
        for norm in scaled_norms(self.channels):
            uses = [nodes[use.node] for use in self.channels.norms if use.path == norm.path]
            if mark_of(uses[0]) is not None:
                continue
            if getattr(module.get_submodule(norm.path), "weight", None) is None:
                report.append(f"{norm.path}: has no weight to scale")
                continue
            modified = True
            graph = module.graph
            with graph.inserting_before(uses[0]):
                gamma = graph.create_node("get_attr", f"{norm.path}.weight")
                scale = graph.create_node("get_attr", f"{STATE}.{scale_name(norm)}")
                scaled = graph.call_function(self.scale, (gamma, scale))
            for use in uses:
                with graph.inserting_before(use):
                    owner = graph.create_node("get_attr", norm.path)
                use.op, use.target = "call_function", forward_with_weight
                use.args = (owner, scaled, *use.args)
                use.meta[META] = Mark("scale", norm.path)
            report.append(f"{norm.path}: {norm.labels.numel()} channels scaled")
        return PassResult(module, modified, tuple(report))
