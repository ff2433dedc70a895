"""What a network computes of a layer's weight beside the layer, as StyleGAN2 demodulates its outputs:

    y = conv2d(x * style, weight) * d       d = rsqrt((weight[None] * style).pow(2).sum((2, 3, 4)))

The weight's two dimensions of channels are followed forward, to what sums over one of them at least: a tensor with
the channels of the other. Sums are of the kept channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from smcp_fx.channels.mixed_weights import MixedWeight, MixedWeights
from smcp_fx.channels.weight_parts import (
    CASTS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    TURNS,
    UNFIT,
    Part,
    Parts,
    UnknownError,
    adds_dims,
    broadcast,
    factors,
    forward,
    kinds,
    merged,
    named_dims,
    order_of,
    plain,
    reduced_dims,
    shape_of,
)
from smcp_fx.channels.weight_views import is_question, weight_and_bias
from smcp_fx.tracing.operations import operation_of, writes_in_place
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo, canonical_names

#: A weight's dimensions of input and output channels.
Dims = tuple[int, int]


@dataclass
class WeightStatistics:
    """What is computed of the parameter ``weight``, by layers read along ``dims``, down to the nodes ``ends``."""

    weight: str
    dims: Dims
    shape: tuple[int, ...]
    parts: dict[fx.Node, Parts] = field(default_factory=dict)  # of nodes with both kinds of channels
    leaves: dict[fx.Node, Parts] = field(default_factory=dict)  # tensors that these and the ends read
    ends: dict[fx.Node, Parts] = field(default_factory=dict)
    #: (end, place among its arguments, parts of what it reads there, dimensions that it mixes)
    mixes: list[tuple[fx.Node, int, Parts, tuple[int, ...]]] = field(default_factory=list)


def weight_statistics(
    module: fx.GraphModule, values: Mapping[str, Any], hidden: Collection[str], known: Mapping[str, Dims]
) -> list[WeightStatistics]:
    """Find them. ``hidden``: nodes that other rules see; ``known``: weights of layers that are in no graph here."""
    names = canonical_names(module)
    reads: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and str(node.target) in names:
            reads.setdefault(names[str(node.target)], []).append(node)
    layers, dims = _layers(module, values, names)
    found = []
    for name, own in {**known, **dims}.items():
        users = {user for read in reads.get(name, ()) for user in read.users}
        if any(user not in layers and not is_question(user) and user.name not in hidden for user in users):
            try:
                shape = shape_of(reads[name][0], values)
                statistics = _followed(
                    module, values, hidden, layers, WeightStatistics(name, own, shape), reads[name]
                )
            except UNFIT:
                continue
            if statistics.ends:
                found.append(statistics)
    return found


def _layers(
    module: fx.GraphModule, values: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[fx.Node, Dims], dict[str, Dims]]:
    """Layers whose weight is a parameter, or one turned or times numbers; the dimensions there, and its own."""
    layers: dict[fx.Node, Dims] = {}
    found: dict[str, Dims] = {}
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
        if weight and groups == 1 and found.setdefault(weight, own) == own:
            layers[use] = dims
    return layers, found


def _before(
    module: fx.GraphModule, values: Mapping[str, Any], node: fx.Node, dims: Dims
) -> tuple[fx.Node | None, Dims]:
    """What a node turns, casts or multiplies by a number, and where its dimensions ``dims`` are there."""
    name = operation_of(module, node) or ""
    inputs = [n for n in node.all_input_nodes if isinstance(values.get(n.name), TensorInfo)]
    if len(inputs) == 1 and name in TURNS:
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
    found: WeightStatistics,
    reads: list[fx.Node],
) -> WeightStatistics:
    """Go forward from the reads of the weight."""
    sides = {found.dims[0]: "in", found.dims[1]: "out"}
    parts = tuple((Part(sides.get(dim, ""), size),) for dim, size in enumerate(found.shape))
    found.parts = dict.fromkeys(reads, parts)
    for node in module.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in found.parts]
        if not sources or is_question(node) or node.name in hidden:
            continue
        if node in layers and sources == [weight_and_bias(node)[0]]:
            read = found.parts[sources[0]]
            if [read[dim] for dim in layers[node]] != [parts[dim] for dim in found.dims]:
                raise UnknownError
            continue
        if node.op not in ("call_function", "call_method") or writes_in_place(node, module):
            raise UnknownError
        made = _made(module, node, sources, values, found)
        if len(kinds(made)) < 2:
            found.ends[node] = made
        else:
            found.parts[node] = made
    if any(len(kinds(told)) > 1 for told in found.leaves.values()):
        raise UnknownError
    for node in reads:
        del found.parts[node]
    return found


def _made(
    module: fx.GraphModule,
    node: fx.Node,
    sources: list[fx.Node],
    values: Mapping[str, Any],
    found: WeightStatistics,
) -> Parts:
    """What the dimensions of a node are made of that reads something with both kinds of channels."""
    name, shape = operation_of(module, node) or "", shape_of(node, values)
    told = found.parts[sources[0]]
    if name in PRODUCTS and len(sources) == 1:
        return _product(name, node, sources[0], values, found)
    if name in REDUCTIONS and sources == [node.args[0]]:
        over = reduced_dims(node, len(told), REDUCTIONS[name])
        if len(kinds(tuple(told[dim] for dim in over))) > 1:
            raise UnknownError  # two masks
        found.mixes.append((node, 0, told, over))
        keep = len(shape) == len(told)
        return tuple(() if dim in over else part for dim, part in enumerate(told) if keep or dim not in over)
    moves = name in RESHAPES or name in TURNS or (name == "getitem" and adds_dims(node))
    if not (moves or name in CASTS or has(name, Trait.ELEMENTWISE)):
        raise UnknownError
    made = plain(shape)
    for source in sources:
        made = forward(module, node, found.parts[source], made, values)
    for other in node.all_input_nodes:
        if other not in sources and isinstance(values.get(other.name), TensorInfo):
            _leaf(found, other, broadcast(made, shape_of(other, values)))
    return made


def _leaf(found: WeightStatistics, node: fx.Node, parts: Parts) -> None:
    found.leaves[node] = merged(found.leaves.get(node), parts)


def _product(
    name: str, node: fx.Node, source: fx.Node, values: Mapping[str, Any], found: WeightStatistics
) -> Parts:
    """A product with a tensor of one kind of channels, over which it sums."""
    given = factors(name, node)
    shapes = [shape_of(one, values) for one in given]
    names, out = named_dims(name, node, shapes, len(shape_of(node, values)))
    if source not in given or len(node.all_input_nodes) != 2:
        raise UnknownError
    place = given.index(source)
    told = dict(zip(names[place], found.parts[source], strict=True))
    sizes = dict(zip(names[1 - place], plain(shapes[1 - place]), strict=True))
    other = tuple(told.get(one, size) if size else () for one, size in sizes.items())
    _leaf(found, given[1 - place], other)
    over = tuple(dim for dim, one in enumerate(sizes) if one not in out)
    if any(kinds((told[one],)) and one not in sizes and one not in out for one in told):
        raise UnknownError  # summed over in the weight alone
    found.mixes.append((node, node.args.index(given[1 - place]), other, over))
    return tuple(told.get(one, sizes.get(one, ())) for one in out)


def followed_weights(
    module: fx.GraphModule,
    values: Mapping[str, Any],
    computed: Collection[str],
    views: Collection[str],
    hidden: set[str],
    turned: Collection[str],
    known: Mapping[str, Dims],
) -> tuple[dict[fx.Node, WeightStatistics], dict[fx.Node, MixedWeight]]:
    """Statistics of weights by the nodes that they end in, and weights computed from the input by their layers.

    The nodes between parameters and these are added to ``hidden``, which no other rule sees. ``turned``: names of
    layers that turned out to mix positions, not channels.
    """
    statistics = weight_statistics(module, values, {*hidden, *views}, known)
    apart = {node for one in statistics for node in (*one.parts, *one.ends)}
    mixed = MixedWeights(module, values, computed, apart, turned).found((*computed, *views))
    lost = [one for one in statistics if not _agree(one, mixed)]
    if lost:
        statistics = [one for one in statistics if one not in lost]
        apart = {node for one in statistics for node in (*one.parts, *one.ends)}
        mixed = MixedWeights(module, values, computed, apart, turned).found((*computed, *views))
    hidden.update(node.name for one in statistics for node in one.parts)
    hidden.update(node.name for weight in mixed.values() for node in weight.parts)
    return {end: one for one in statistics for end in one.ends}, mixed


def _agree(one: WeightStatistics, mixed: Mapping[fx.Node, MixedWeight]) -> bool:
    """Are its nodes those of the weights that layers read, too, and of no other's?"""
    known = {*one.parts, *one.ends}
    layers = {
        user for node in one.parts for user in node.users if user not in known and not is_question(user)
    }
    others = [found.parts for found in mixed.values()]
    return layers <= mixed.keys() and all(
        found.get(node, parts) == parts for found in others for node, parts in one.parts.items()
    )
