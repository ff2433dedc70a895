"""FLOPs of a network as a function of the channels it keeps.

Counted as the pruning literature does: one multiply-add of a convolution, linear or product of tensors is one FLOP,
one image at a time (ResNet-50: 4.09 G).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from math import prod

from torch import Tensor, fx

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.labels import varied_dims
from smcp_fx.channels.trail import Layer
from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.costs.terms import network_cost, proportional, without_branch
from smcp_fx.tracing.modes import run_in_eval
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.tracer import Traced


class FlopsCost:
    """Multiply-adds of one image in eval mode: convolutions, linears, products of tensors, and what is opaque.

    What the channel graph has no layers for costs what a run on the example inputs took, whatever the counts are:
    modules called as they are (``leaves=``, `nn.TransformerEncoder`, `nn.LSTM`), and, of a model traced in parts, the
    Python around them. Where that depends on the data (a detector's head runs once a proposal) so does the count: it
    is that of these inputs, with the weights that the model had.
    """

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Bind to a network."""
        images = _images(traced, channels)
        positions: dict[tuple[str, tuple[Width, ...]], float] = defaultdict(float)
        nodes: dict[str, list[str]] = defaultdict(list)
        deployed = run_in_eval(traced.module.graph)
        for layer in channels.layers:  # a layer that is called again costs again
            if layer.node not in deployed:
                continue
            positions[layer.path, _weight_widths(channels, layer)] += _positions(layer, images)
            nodes[layer.path].append(layer.node)
        terms = [
            without_branch(channels, nodes[path], CostTerm(path, widths, proportional(times)))
            for (path, widths), times in positions.items()
        ]
        terms += [
            without_branch(channels, [node], CostTerm(node, (width,), proportional(count / images / of)))
            for node, count, width, of in _products(traced, channels, set().union(*nodes.values()))
        ]
        return network_cost("FLOPs", channels, terms, traced.outside / images)


def _weight_widths(channels: ChannelGraph, layer: Layer) -> tuple[Width, ...]:
    """Kept slots of the weight's channel dimensions: their product times the kernel is the kept weight."""
    if layer.kind == "depthwise":
        return (channels.width(layer.out_labels),)
    return channels.width(layer.in_labels), channels.width(layer.out_labels)


def _images(traced: Traced, channels: ChannelGraph) -> int:
    """The images of the example run. A layer's own batch may be another: windows, boxes, positions."""
    first = channels.layers[0] if channels.layers else None
    if first is not None and first.images != first.in_shape[0]:
        return 1  # its input has no batch
    return traced.images or (first.images if first is not None else 1)


def _products(
    traced: Traced, channels: ChannelGraph, layers: Collection[str]
) -> Iterator[tuple[str, int, Width, int]]:
    """What nodes beside ``layers`` compute: (node, multiply-adds, the width they are in proportion to, all of it).

    A product of tensors that sums over channels is in proportion to what is left of these, another one to what is
    left of its result; in attention the scores are to what is left of the queries.
    """
    summed = {mix.node: mix.labels.reshape(-1) for mix in channels.trail.mixes}
    nodes = {node.name: node for node in traced.module.graph.nodes}
    for name in traced.work.keys() - layers:
        count, node = traced.work[name], nodes.get(name)
        if node is not None and operation_of(traced.module, node) == "scaleddotproductattention":
            query, value = (_argument(node, *which) for which in ((0, "query"), (2, "value")))
            lengths = [traced.values[given.name].shape[-1] for given in (query, value)]
            scores = count * lengths[0] // sum(lengths)
            yield name, scores, *_left(channels, query.name)
            count -= scores
        if name in summed:
            yield name, count, channels.width(summed[name]), summed[name].numel()
        else:
            yield name, count, *_left(channels, name)


def _argument(node: fx.Node, place: int, name: str) -> fx.Node:
    given = node.args[place] if len(node.args) > place else node.kwargs[name]
    assert isinstance(given, fx.Node)
    return given


def _left(channels: ChannelGraph, node: str) -> tuple[Width, int]:
    """What is left of a node's tensor: a width, and all of it; 1 of 1 where all of it stays."""
    labels = channels.trail.labels.get(node)
    if not isinstance(labels, Tensor):
        return Width(1), 1
    units = channels.units.of(labels)
    line = labels
    for dim in set(range(labels.dim())) - set(varied_dims(units)):
        line = line.narrow(dim, 0, 1)
    return channels.width(line.reshape(-1)), line.numel()


def _positions(layer: Layer, images: int) -> float:
    """Multiply-adds a weight takes part in, for one image, times the weight's elements a channel pair."""
    dims = {layer.out_dim} if layer.kind == "depthwise" else {layer.in_dim, layer.out_dim}
    kernel = prod(size for dim, size in enumerate(layer.weight_shape) if dim not in dims)
    shape = layer.in_shape if layer.transposed else layer.out_shape
    channels = layer.input_channels if layer.transposed else layer.output_channels
    return kernel * prod(shape) / (images * channels.numel())
