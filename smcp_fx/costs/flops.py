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
from smcp_fx.channels.labels import narrow_uniform, varied_dims
from smcp_fx.channels.trail import Layer
from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.costs.terms import network_cost, proportional, without_branch
from smcp_fx.tracing.modes import run_in_eval
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.recurrent import recurrent
from smcp_fx.tracing.tracer import Traced


class FlopsCost:
    """Multiply-adds of one image in eval mode: convolutions, linears, products of tensors, and opaque work.

    Opaque work has a fixed cost, counted in a run on the example inputs: modules called as they are
    (``leaves=``, recurrent layers with a projection), and the Python around the parts of a model traced in
    parts. If that work depends on the data (a detector's head runs once per proposal), the count holds for
    these inputs and the weights at the time.
    """

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Return the cost of one network."""
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
            without_branch(channels, [node], CostTerm(node, widths, proportional(count / images / of)))
            for node, count, widths, of in _products(traced, channels, set().union(*nodes.values()))
        ]
        return network_cost("FLOPs", channels, terms, traced.outside / images)


def _weight_widths(channels: ChannelGraph, layer: Layer) -> tuple[Width, ...]:
    """Return the kept slots of the weight's channel dimensions; times the kernel they give the kept weight."""
    if layer.kind == "depthwise":
        return (channels.width(layer.out_labels),)
    slots = channels.trail.slots.get(layer.weight, {})
    others = (channels.width(slots[dim]) for dim in layer.beside if dim in slots)
    return channels.width(layer.in_labels), channels.width(layer.out_labels), *others


def _images(traced: Traced, channels: ChannelGraph) -> int:
    """Return the images of the example run. A layer's own batch may be windows, boxes or positions instead."""
    first = channels.layers[0] if channels.layers else None
    if first is not None and first.images != first.in_shape[0]:
        return 1  # its input has no batch
    return traced.images or (first.images if first is not None else 1)


def _products(
    traced: Traced, channels: ChannelGraph, layers: Collection[str]
) -> Iterator[tuple[str, int, tuple[Width, ...], int]]:
    """Yield the work outside ``layers``: (node, multiply-adds, widths these scale with, their full product).

    A product of tensors scales with the kept channels that it sums over and with those of its result: rows,
    and columns if it has some, or both sides of a weight. In attention, the scores scale with the queries'
    kept channels.
    """
    summed = {mix.node: mix.labels.reshape(-1) for mix in channels.trail.mixes}
    nodes = {node.name: node for node in traced.module.graph.nodes}
    for name in traced.work.keys() - layers:
        count, node = traced.work[name], nodes.get(name)
        if node is not None and node.target is recurrent and any(n.name in layers for n in node.args[1]):
            continue  # counted by its weights
        if node is not None and operation_of(traced.module, node) == "scaleddotproductattention":
            query, value = (_argument(node, *which) for which in ((0, "query"), (2, "value")))
            lengths = [traced.values[operand.name].shape[-1] for operand in (query, value)]
            scores = count * lengths[0] // sum(lengths)
            width, of = _left(channels, query.name)
            yield name, scores, (width,), of
            count -= scores
        if name in channels.trail.full:
            yield name, count, (), 1
            continue
        lines = [summed[name]] if name in summed and count == traced.work[name] else []
        lines += (
            [narrow_uniform(channels.trail.blocks[name]).reshape(-1)] if name in channels.trail.blocks else []
        )
        parts = (part for dim in channels.trail.mixed.get(name, ()) for part in dim)
        lines += [part for part in parts if isinstance(part, Tensor)]
        width, of = _left(channels, name)
        widths = (width, *(channels.width(line) for line in lines))
        yield name, count, widths, prod((of, *(line.numel() for line in lines)))


def _argument(node: fx.Node, place: int, name: str) -> fx.Node:
    operand = node.args[place] if len(node.args) > place else node.kwargs[name]
    assert isinstance(operand, fx.Node)
    return operand


def _left(channels: ChannelGraph, node: str) -> tuple[Width, int]:
    """Return the kept width of a node's tensor and its full width; 1 and 1 if nothing can go."""
    labels = channels.trail.labels.get(node)
    if not isinstance(labels, Tensor):
        return Width(1), 1
    units = channels.units.of(labels)
    line = labels
    for dim in set(range(labels.dim())) - set(varied_dims(units)):
        line = line.narrow(dim, 0, 1)
    return channels.width(line.reshape(-1)), line.numel()


def _positions(layer: Layer, images: int) -> float:
    """Return the multiply-adds of one image for each pair of channels (each channel, if depthwise)."""
    dims = {layer.out_dim} if layer.kind == "depthwise" else {layer.in_dim, layer.out_dim}
    others = dims.union(layer.beside)
    kernel = prod(size for dim, size in enumerate(layer.weight_shape) if dim not in others)
    shape = layer.in_shape if layer.transposed else layer.out_shape
    width = layer.input_channels if layer.transposed else layer.output_channels
    return kernel * prod(shape) / (images * max(width.numel(), 1))  # a layer may have none
