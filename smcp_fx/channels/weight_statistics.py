"""Statistics of a layer's weight that the network computes beside the layer, as in StyleGAN2's demodulation:

    y = conv2d(x * style, weight) * d       d = rsqrt((weight[None] * style).pow(2).sum((2, 3, 4)))

The weight's input and output channels are followed forward to an operation that sums over one of the two. Its result
has the channels of the other, and the sum is over the kept channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from smcp_fx.channels.mixed_weights import Followed, MixedWeight
from smcp_fx.channels.weight_factors import (
    CASTS,
    UNFIT,
    Factors,
    Part,
    Parts,
    UnknownError,
    shape_of,
)
from smcp_fx.channels.weight_views import is_question, order_of, weight_and_bias
from smcp_fx.tracing.operations import operation_of, writes_in_place
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo, canonical_names

#: A weight's dimensions of input and output channels.
Dims = tuple[int, int]


@dataclass
class WeightStatistics(Followed):
    """Tensors computed from the parameter ``weight``, which layers read along ``dims``, up to the nodes ``ends``."""

    weight: str = field(kw_only=True)
    dims: Dims = field(kw_only=True)
    shape: tuple[int, ...] = field(kw_only=True)
    ends: dict[fx.Node, Parts] = field(default_factory=dict)


def weight_statistics(
    module: fx.GraphModule, values: Mapping[str, Any], hidden: Collection[str], beside: Mapping[str, Dims]
) -> list[WeightStatistics]:
    """Find the statistics. ``hidden``: nodes rules skip; ``beside``: weights of layers outside the graph."""
    names = canonical_names(module)
    reads: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and str(node.target) in names:
            reads.setdefault(names[str(node.target)], []).append(node)
    layers, dims = _layers(module, values, names)
    results = []
    for name, own in {**beside, **dims}.items():
        users = {user for read in reads.get(name, ()) for user in read.users}
        if any(user not in layers and not is_question(user) and user.name not in hidden for user in users):
            try:
                shape = shape_of(reads[name][0], values)
                one = WeightStatistics(weight=name, dims=own, shape=shape)
                statistics = _followed(module, values, hidden, layers, one, reads[name])
            except UNFIT:
                continue
            if statistics.ends:
                results.append(statistics)
    return results


def _layers(
    module: fx.GraphModule, values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[fx.Node, Dims], dict[str, Dims]]:
    """Layers that read a (scaled) parameter: the channel dimensions of their weight, and of the parameter."""
    layers: dict[fx.Node, Dims] = {}
    dims_of: dict[str, Dims] = {}
    for use in module.graph.nodes:
        name = operation_of(module, use) or ""
        if not (name.startswith("conv") or name == "linear"):
            continue
        dims = own = (0, 1) if "transpose" in name else (1, 0)
        if use.op == "call_module":
            weight, groups = (
                f"{use.target}.weight",
                getattr(module.get_submodule(str(use.target)), "groups", 1),
            )
        else:
            node, groups = weight_and_bias(use)[0], _groups(name, use)
            while isinstance(node, fx.Node) and node.op != "get_attr":
                node, own = _before(module, values, node, own)
            weight = str(node.target) if isinstance(node, fx.Node) else ""
        weight = names.get(weight, "")
        if weight and groups == 1 and dims_of.setdefault(weight, own) == own:
            layers[use] = dims
    return layers, dims_of


def _before(
    module: fx.GraphModule, values: Mapping[str, Any], node: fx.Node, dims: Dims
) -> tuple[fx.Node | None, Dims]:
    """The tensor that a node permutes, casts or scales, and the places of the dimensions ``dims`` in it."""
    name = operation_of(module, node) or ""
    inputs = [n for n in node.all_input_nodes if isinstance(values.get(n.name), TensorInfo)]
    if len(inputs) == 1 and has(name, Trait.PERMUTES):
        order = order_of(node, len(shape_of(node, values)))
        return inputs[0], (order[dims[0]], order[dims[1]])
    scaled = len(inputs) == 1 and (name in CASTS or has(name, Trait.ELEMENTWISE))
    return (inputs[0] if scaled else None), dims


def _groups(name: str, use: fx.Node) -> Any:
    return 1 if name == "linear" else use.args[6] if len(use.args) > 6 else use.kwargs.get("groups", 1)


def _followed(
    module: fx.GraphModule,
    values: Mapping[str, Any],
    hidden: Collection[str],
    layers: Mapping[fx.Node, Dims],
    statistics: WeightStatistics,
    reads: list[fx.Node],
) -> WeightStatistics:
    """Follow the weight forward from its reads."""
    sides = {statistics.dims[0]: "in", statistics.dims[1]: "out"}
    parts = tuple((Part(sides.get(dim, ""), size),) for dim, size in enumerate(statistics.shape))
    factors = Factors(module, values)
    nodes, leaves, ends = dict.fromkeys(reads), dict[fx.Node, None](), dict[fx.Node, None]()
    for read in reads:
        factors.bind(read, parts)
    for node in module.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in nodes]
        if not sources or is_question(node) or node.name in hidden:
            continue
        if node in layers and sources == [weight_and_bias(node)[0]]:
            seen = factors.parts(sources[0])
            if [seen[dim] for dim in layers[node]] != [parts[dim] for dim in statistics.dims]:
                raise UnknownError
            continue
        if node.op not in ("call_function", "call_method") or writes_in_place(node, module):
            raise UnknownError
        leaves.update(dict.fromkeys(one for one in factors.relate(node) if one not in nodes))
        (ends if len(factors.kinds(node)) < 2 else nodes)[node] = None
    for node, _, tensor, over in factors.mixes:
        mixed = factors.kinds(tensor, over)
        if len(mixed) > 1 or (mixed and node not in ends):  # two masks, or no place for one
            raise UnknownError
    if any(len(factors.kinds(leaf)) > 1 for leaf in leaves):
        raise UnknownError
    statistics.describe(factors, (node for node in nodes if node not in reads), leaves)
    statistics.ends = {end: factors.parts(end) for end in ends}
    return statistics


def read_alike(one: WeightStatistics, mixed: Mapping[fx.Node, MixedWeight]) -> bool:
    """Do all readers of its tensors agree on their factors: the statistic itself, and layers of mixed weights?"""
    own = {*one.parts, *one.ends}
    layers = {user for node in one.parts for user in node.users if user not in own and not is_question(user)}
    others = [mixed_weight.parts for mixed_weight in mixed.values()]
    return layers <= mixed.keys() and all(
        mixed_weight.get(node, parts) == parts for mixed_weight in others for node, parts in one.parts.items()
    )
