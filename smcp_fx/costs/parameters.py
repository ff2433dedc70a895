"""Parameters of a network as a function of the channels it keeps."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from torch import Tensor

from smcp_fx.channels import ChannelGraph
from smcp_fx.channels.labels import varied_dims
from smcp_fx.cost_model import CostTerm, NetworkCost, Width
from smcp_fx.costs.terms import network_cost, proportional, without_branch
from smcp_fx.tracing.tracer import Traced
from smcp_fx.tracing.values import held


class ParamsCost:
    """Parameters of the whole network (buffers not counted), computed weights as `convert` leaves them."""

    def network_cost(self, traced: Traced, channels: ChannelGraph) -> NetworkCost:
        """Return the cost of one network."""
        terms = []
        readers = _readers(traced) if channels.branches is not None else {}
        for name, shape in _shapes(traced, channels).items():
            slots = channels.trail.slots.get(name, {})
            dims = {dim: channels.width(labels) for dim, labels in slots.items()}
            elements = channels.trail.elements.get(name)
            if elements is not None and not dims:
                dims = _element_widths(channels, elements)
            mixed = [part for dim in channels.trail.mixed_parameters.get(name, ()) for part in dim]
            if mixed:  # several dimensions in one
                shape = tuple(part.numel() if isinstance(part, Tensor) else part for part in mixed)
                dims = {d: channels.width(part) for d, part in enumerate(mixed) if isinstance(part, Tensor)}
            widths = tuple(width for _, width in sorted(dims.items()) if width.groups)
            rest = prod(size for dim, size in enumerate(shape) if dim not in dims)
            rest *= prod(width.constant for width in dims.values() if not width.groups)
            term = without_branch(channels, readers.get(name, ()), CostTerm(name, widths, proportional(rest)))
            terms.append(term)
        return network_cost("parameters", channels, terms, 0.0)


def _shapes(traced: Traced, channels: ChannelGraph) -> dict[str, tuple[int, ...]]:
    computed = channels.trail.computed
    gone = {name for found in computed.values() for name in found.unread}
    shapes = {name: tuple(p.shape) for name, p in traced.module.named_parameters() if name not in gone}
    return shapes | {name: found.shape for name, found in computed.items()}


def _readers(traced: Traced) -> dict[str, list[str]]:
    """The nodes that read each parameter."""
    names = {id(parameter): name for name, parameter in traced.module.named_parameters()}
    found: dict[str, list[str]] = defaultdict(list)
    for node in traced.module.graph.nodes:
        if node.op == "call_module":
            for parameter in traced.module.get_submodule(str(node.target)).parameters():
                found[names[id(parameter)]].append(node.name)
        elif node.op == "get_attr":
            tensor = held(traced.module, str(node.target))
            if id(tensor) in names:
                found[names[id(tensor)]].append(node.name)
    return found


def _element_widths(channels: ChannelGraph, elements: Tensor) -> dict[int, Width]:
    varied = varied_dims(channels.units.of(elements))
    if len(varied) != 1:
        return {}
    line = elements
    for dim in range(elements.dim()):
        if dim != varied[0]:
            line = line.narrow(dim, 0, 1)
    return {varied[0]: channels.width(line.reshape(-1))}
