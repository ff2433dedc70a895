"""FLOPs and parameters of a network as functions of the channels it keeps.

FLOPs are counted as the pruning literature does: one multiply-add of a convolution, linear or product of tensors is
one FLOP, one image at a time (ResNet-50: 4.09 G).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from smcp_fx.block_signature import operation_of
from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.labels import varied_dims
from smcp_fx.channels.trail import Layer
from smcp_fx.config import is_number
from smcp_fx.cost_model import CostTerm, NetworkCost, Price, Width
from smcp_fx.errors import InputError
from smcp_fx.modes import run_in_eval
from smcp_fx.tracing import Traced


class CostModel(Protocol):
    """Anything that can price a network: a latency table, for instance."""

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Bind the cost to one network."""
        ...


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
            without_branch(channels, nodes[path], CostTerm(path, widths, _times(times)))
            for (path, widths), times in positions.items()
        ]
        terms += [
            without_branch(channels, [node], CostTerm(node, (width,), _times(count / images / of)))
            for node, count, width, of in _products(traced, channels, set().union(*nodes.values()))
        ]
        return _network("FLOPs", channels, terms, traced.outside / images)


class ParamsCost:
    """Parameters of the whole network (buffers not counted)."""

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Bind to a network."""
        terms, constant = [], 0.0
        readers = _readers(traced) if channels.branches is not None else {}
        for name, parameter in traced.module.named_parameters():
            slots = channels.trail.slots.get(name, {})
            dims = {dim: channels.width(labels) for dim, labels in slots.items()}
            elements = channels.trail.elements.get(name)
            if elements is not None and not dims:
                dims = _element_widths(channels, elements)
            widths = tuple(width for _, width in sorted(dims.items()) if width.groups)
            rest = prod(size for dim, size in enumerate(parameter.shape) if dim not in dims)
            rest *= prod(width.constant for width in dims.values() if not width.groups)
            term = without_branch(channels, readers.get(name, ()), CostTerm(name, widths, _times(rest)))
            if term.widths:
                terms.append(term)
            else:
                constant += parameter.numel()
        return _network("parameters", channels, terms, constant)


NAMED: dict[str, Any] = {"flops": FlopsCost, "params": ParamsCost}


def _network(unit: str, channels: ChannelGraph, terms: list[CostTerm], constant: float) -> NetworkCost:
    permitted = {group.name: group.permitted for group in channels.groups if group.free}
    kept: list[CostTerm] = []
    for term in terms:
        if term.groups:
            kept.append(term)
        else:
            constant += term.cost({})
    return NetworkCost(unit, permitted, tuple(kept), constant)


def without_branch(channels: ChannelGraph, nodes: Collection[str], term: CostTerm) -> CostTerm:
    """The term, and nothing where these nodes are of no use since a group keeps nothing (layer pruning).

    Left as it is where it says so itself, and where it depends on two widths already.
    """
    free = tuple(width for width in term.widths if width.groups)
    if channels.branches is None or len(free) > 1:
        return term
    own = [width.groups[0][0] for width in free if len(width.groups) == 1 and not width.constant]
    remover = channels.branches.remover(nodes, own)
    if remover is None:
        return term

    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        given = iter(widths[:-1])
        every = [next(given) if width.groups else np.asarray(width.constant) for width in term.widths]
        return np.where(widths[-1] > 0, term.price(*every), 0.0)

    return CostTerm(term.name, (*free, Width(groups=((remover, 1),))), price)


def _readers(traced: Traced) -> dict[str, list[str]]:
    """The nodes that read each parameter."""
    names = {id(parameter): name for name, parameter in traced.module.named_parameters()}
    found: dict[str, list[str]] = defaultdict(list)
    for node in traced.module.graph.nodes:
        if node.op == "call_module":
            for parameter in traced.module.get_submodule(str(node.target)).parameters():
                found[names[id(parameter)]].append(node.name)
        elif node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            held = getattr(traced.module.get_submodule(path), name)
            if id(held) in names:
                found[names[id(held)]].append(node.name)
    return found


def _times(factor: float) -> Price:
    def price(*widths: NDArray[np.int64]) -> NDArray[np.float64]:
        result = np.asarray(float(factor))
        for width in widths:
            result = result * width
        return result

    return price


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

    A product of tensors sums over channels that all go or all stay, so it is in proportion to what is left of its
    result; in attention the scores are to what is left of the queries.
    """
    nodes = {node.name: node for node in traced.module.graph.nodes}
    for name in traced.work.keys() - layers:
        count, node = traced.work[name], nodes.get(name)
        if node is not None and operation_of(traced, node) == "scaleddotproductattention":
            query, value = (_argument(node, *which) for which in ((0, "query"), (2, "value")))
            lengths = [traced.values[given.name].shape[-1] for given in (query, value)]
            scores = count * lengths[0] // sum(lengths)
            yield name, scores, *_left(channels, query.name)
            count -= scores
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


def _element_widths(channels: ChannelGraph, elements: Tensor) -> dict[int, Width]:
    varied = varied_dims(channels.units.of(elements))
    if len(varied) != 1:
        return {}
    line = elements
    for dim in range(elements.dim()):
        if dim != varied[0]:
            line = line.narrow(dim, 0, 1)
    return {varied[0]: channels.width(line.reshape(-1))}


_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def absolute_target(target: float | str, full: float, unit: str) -> float:
    """Return a target in the cost's unit.

    ``target`` is a fraction of ``full`` in (0, 1] (also as "50 %"), or an absolute cost with its unit:
    "1.2 GFLOPs", "3.5 ms", "2 M parameters". Raises `InputError` for anything else.
    """
    percent = re.fullmatch(r"\s*([0-9.eE+-]+)\s*%\s*", target) if isinstance(target, str) else None
    if percent is not None:
        try:
            value = float(percent[1]) / 100
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            raise InputError(
                f"target {target!r} is no share of the unpruned cost: give more than 0 and at most 100 %"
            )
        return value * full
    if isinstance(target, str):
        match = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*([kKMGT]?)\s*([A-Za-z]+)\s*", target)
        if match is None or match[3].lower().rstrip("s") != unit.lower().rstrip("s"):
            raise InputError(f"target {target!r} is not a cost in {unit}: give a number and the unit")
        try:
            value = float(match[1]) * _PREFIX[match[2].upper()]
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise InputError(f"target {target!r} must be a positive, finite cost in {unit}")
    else:
        if not is_number(target) or not 0 < target <= 1:
            raise InputError(
                f"target {target!r} is no fraction of the unpruned cost in (0, 1]; give one, or an absolute cost "
                f"with its unit ({unit})"
            )
        value = float(target) * full
    return value


def bind(cost: str | CostModel, traced: Traced, channels: ChannelGraph) -> NetworkCost:
    """Bind "flops", "params" or a cost model to a network."""
    if isinstance(cost, str):
        if cost not in NAMED:
            raise InputError(f"cost must be one of {', '.join(NAMED)} or a cost model, not {cost!r}")
        model: CostModel = NAMED[cost]()
    elif isinstance(cost, type) or not callable(getattr(cost, "network_cost", None)):
        raise InputError(f"cost must be one of {', '.join(NAMED)} or a cost model, not {cost!r}")
    else:
        model = cost
    return model.network_cost(traced, channels)
