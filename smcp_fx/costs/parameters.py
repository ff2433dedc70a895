"""Parameters of a network as a function of the channels it keeps."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from torch import Tensor

from smcp_fx.channels import ChannelGraph
from smcp_fx.cost_model import CostTerm, NetworkCost
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
            factors = channels.factors(name)
            parts = [part for dim, size in enumerate(shape) for part in factors.get(dim, (size,))]
            kept = [channels.width(part) for part in parts if isinstance(part, Tensor)]
            rest = prod(part for part in parts if not isinstance(part, Tensor))
            rest *= prod(width.constant for width in kept if not width.groups)
            widths = tuple(width for width in kept if width.groups)
            term = without_branch(channels, readers.get(name, ()), CostTerm(name, widths, proportional(rest)))
            terms.append(term)
        return network_cost("parameters", channels, terms, 0.0)


def _shapes(traced: Traced, channels: ChannelGraph) -> dict[str, tuple[int, ...]]:
    computed = channels.trail.computed
    gone = {name for weight in computed.values() for name in weight.unread}
    shapes = {name: tuple(p.shape) for name, p in traced.module.named_parameters() if name not in gone}
    return shapes | {name: weight.shape for name, weight in computed.items()}


def _readers(traced: Traced) -> dict[str, list[str]]:
    """Return the nodes that read each parameter."""
    names = {id(parameter): name for name, parameter in traced.module.named_parameters()}
    readers: dict[str, list[str]] = defaultdict(list)
    for node in traced.module.graph.nodes:
        if node.op == "call_module":
            for parameter in traced.module.get_submodule(str(node.target)).parameters():
                readers[names[id(parameter)]].append(node.name)
        elif node.op == "get_attr":
            tensor = held(traced.module, str(node.target))
            if id(tensor) in names:
                readers[names[id(tensor)]].append(node.name)
    return readers
