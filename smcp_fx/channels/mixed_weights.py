"""Weights that are computed from the input: mixtures of kernels, modulated convolutions, hypernetworks.

    w = (routing @ weight).view(b * o, i, 3, 3)       weight [experts, o * i * 9]
    y = conv2d(x.view(1, b * i, h, w), w, groups=b)
    y = bmm(linear(z).view(b, o, i), x)

Such a weight has two dimensions of channels, as a parameter has. They are followed back, through what computes it, to
dimensions of parameters, where several may lie in one, and to tensors that have one of them (styles), whose channels
go with them. What the last product reads (routing, a hypernetwork's features) has channels of its own, which the
parameter's other dimension goes with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from smcp_fx.channels.weight_parts import (
    CASTS,
    COPIES,
    NORMS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    TURNS,
    UNFIT,
    Part,
    Parts,
    UnknownError,
    added,
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
    regrouped,
    shape_of,
)
from smcp_fx.channels.weight_views import is_question, weight_and_bias
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.operations import operation_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import TensorInfo


@dataclass(frozen=True)
class Reading:
    """How a layer reads its weight ``result``, of ``images`` images: pairs are of (input, output).

    ``operand``: the place of what it is applied to among the arguments; ``dims``: those of the weight, which has
    ``shape`` if it is taken for a parameter; ``axes``: those of the operand and of the result.
    """

    result: fx.Node
    operand: int
    images: int
    parts: Parts
    shape: tuple[int, ...]
    dims: tuple[int, int]
    axes: tuple[int, int]
    order: tuple[int, ...] = ()  # of a product: for each dimension of the result, the operand's


@dataclass
class MixedWeight:
    """The weight that the layer ``use`` reads, and what computes it."""

    use: fx.Node
    reading: Reading
    parts: dict[fx.Node, Parts] = field(
        default_factory=dict
    )  # of the nodes between parameters and the weight
    parameters: dict[fx.Node, Parts] = field(default_factory=dict)  # read as tensors
    modules: dict[fx.Node, Parts] = field(default_factory=dict)  # linears: parts of their weight
    leaves: dict[fx.Node, Parts] = field(default_factory=dict)  # with channels of one kind, or none
    #: Sums and norms: (node, whose dimensions, those that it mixes).
    mixes: list[tuple[fx.Node, fx.Node, tuple[int, ...]]] = field(default_factory=list)
    whole: list[tuple[fx.Node, int]] = field(default_factory=list)  # dimensions that must have no channels
    #: Products with what is read: (product, place among its arguments, dimension that is summed over).
    reads: list[tuple[fx.Node, int, int]] = field(default_factory=list)


class MixedWeights:
    """Finds them in a traced module, by the layer that reads them.

    ``computed``: nodes that compute weights from parameters alone; ``apart``: others that may read what is between;
    ``turned``: names of layers that mix positions, not channels.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: Mapping[str, Any],
        computed: Collection[str],
        apart: Collection[fx.Node] = (),
        turned: Collection[str] = (),
    ) -> None:
        self._module, self._values, self._computed, self._apart = module, values, computed, apart
        self._turned = turned
        self._order = {node: place for place, node in enumerate(module.graph.nodes)}

    def found(self, known: Collection[str]) -> dict[fx.Node, MixedWeight]:
        """All of them, but for layers that read one of the nodes ``known``, or a parameter."""
        found: dict[fx.Node, MixedWeight] = {}
        for use in (node for node in self._order if node.name not in self._turned):
            for reading in self._readings(use):
                result = reading.result
                if result.name in known or result.op in ("get_attr", "placeholder") or use in found:
                    continue
                for told in (True, False):  # what cannot be followed with what is read may be so without
                    try:
                        found[use] = self._followed(MixedWeight(use, reading), told)
                        break
                    except UNFIT:
                        continue
        return found

    # ---- layers -----------------------------------------------------------------------------------------

    def _readings(self, use: fx.Node) -> Iterator[Reading]:
        """The ways in which a node may be a layer that reads a weight."""
        name = operation_of(self._module, use) or ""
        try:
            if use.op == "call_function" and (name.startswith("conv") or name == "linear"):
                yield from self._of_layer(name, use)
            elif use.op != "call_module" and name in PRODUCTS and name != "linear":
                for place in (0, 1):
                    yield from self._of_product(name, use, place)
        except UNFIT:
            return

    def _of_layer(self, name: str, use: fx.Node) -> Iterator[Reading]:
        weight = weight_and_bias(use)[0]
        shape = shape_of(weight, self._values)
        images = _images(self._module, use, self._values)
        if shape[0] % images or shape[1] == 1:
            return
        first, second = ("in", "out") if "transpose" in name else ("out", "in")
        rows = (Part("", images), Part(first, shape[0] // images))
        kernel = tuple((Part("", size),) for size in shape[2:])
        parts = (rows if images > 1 else rows[1:], (Part(second, shape[1]),), *kernel)
        axis = len(shape_of(use.args[0], self._values)) - len(shape) + 1
        whole = (shape[0] // images, *shape[1:])
        dims = (0, 1) if "transpose" in name else (1, 0)
        yield Reading(weight, 0, images, parts, whole, dims, (axis, axis))

    def _of_product(self, name: str, use: fx.Node, place: int) -> Iterator[Reading]:
        """A product that sums over one dimension of a computed matrix, and makes another."""
        given = factors(name, use)
        shapes = [shape_of(one, self._values) for one in given]
        names, out = named_dims(name, use, shapes, len(shape_of(use, self._values)))
        own, others = names[place], names[1 - place]
        summed = [n for n in own if n in others and n not in out]
        made = [n for n in own if n in out and n not in others]
        if len(summed) != 1 or len(made) != 1 or not set(own + others) <= {*out, *summed}:
            return
        kind = {summed[0]: "in", made[0]: "out"}
        sizes = dict(zip(own, shapes[place], strict=True))
        if min(sizes[n] for n in kind) == 1:
            return
        parts = tuple((Part(kind.get(n, ""), size),) if size > 1 else () for n, size in sizes.items())
        whole = tuple(size if n in kind else 1 for n, size in sizes.items())
        dims = own.index(summed[0]), own.index(made[0])
        axes = others.index(summed[0]), out.index(made[0])
        order = tuple(others.index(n if n in others else summed[0]) for n in out)
        yield Reading(given[place], use.args.index(given[1 - place]), 1, parts, whole, dims, axes, order)

    # ---- the way back -----------------------------------------------------------------------------------

    def _followed(
        self, found: MixedWeight, told: bool, through: frozenset[fx.Node] = frozenset()
    ) -> MixedWeight:
        """Go back from the weight, the last nodes first.

        ``told``: follow what the last products read, too; ``through``: nodes that are known to be made of something
        with both kinds of channels, as what a weight is divided by is of that weight.
        """
        wanted: dict[fx.Node, Parts] = {found.reading.result: found.reading.parts}
        while todo := wanted.keys() - found.parts.keys() - found.leaves.keys():
            node = max(todo, key=self._order.__getitem__)
            if (
                len(kinds(wanted[node])) < 2
                and node not in through
                and not self._is_crossed(node, todo, wanted)
            ):
                found.leaves[node] = wanted[node]
                continue
            others = {user for user in node.users if not is_question(user)} - found.parts.keys()
            others -= {found.use, *self._apart}
            if others:
                crossed = {leaf for leaf in found.leaves if not others.isdisjoint(ancestors(leaf))}
                if not crossed:
                    raise UnknownError
                return self._followed(MixedWeight(found.use, found.reading), told, through | crossed)
            if node.op == "get_attr" or node.name in self._computed:
                found.parameters[node] = wanted[node]
            else:
                for source, parts in self._sources(node, wanted[node], found, told):
                    wanted[source] = merged(wanted.get(source), parts)
            found.parts[node] = wanted[node]
        for node in sorted(found.parts.keys() - found.parameters.keys(), key=self._order.__getitem__):
            # A sum tells nothing of the dimensions that it sums over.
            for source in node.all_input_nodes:
                if source in found.parts:
                    known = found.parts[source], found.parts[node]
                    found.parts[node] = forward(self._module, node, *known, self._values)
        mixed = any(kinds((found.parts[node][dim],)) for node, dim in found.whole if node in found.parts)
        for _, source, over in found.mixes:
            mixed |= len(kinds(tuple(found.parts[source][dim] for dim in over))) > 1  # two masks
        if mixed or not (found.parameters or found.modules):
            raise UnknownError
        return found

    def _is_crossed(self, node: fx.Node, todo: set[fx.Node], wanted: dict[fx.Node, Parts]) -> bool:
        """Is it computed from something that has both kinds of channels?"""
        others = {other for other in todo if other is not node and len(kinds(wanted[other])) > 1}
        return bool(others) and not others.isdisjoint(ancestors(node))

    def _sources(
        self, node: fx.Node, parts: Parts, found: MixedWeight, told: bool
    ) -> Iterator[tuple[fx.Node, Parts]]:
        """The tensors that a node reads, and what their dimensions are made of."""
        values, name = self._values, operation_of(self._module, node) or ""
        inputs = [n for n in node.all_input_nodes if isinstance(values.get(n.name), TensorInfo)]
        first = node.args[0] if node.args else None
        if name in RESHAPES or (name == "getitem" and adds_dims(node)):
            if inputs != [first]:
                raise UnknownError
            yield inputs[0], regrouped(parts, shape_of(first, values))
        elif name in TURNS:
            order = order_of(node, len(parts))
            yield inputs[0], tuple(parts[order.index(dim)] for dim in range(len(parts)))
        elif name in ("expand", "expandas", "broadcastto") or name in CASTS:
            yield inputs[0], broadcast(parts, shape_of(first, values))
        elif node.op == "call_module":
            yield self._of_module(name, node, parts, found, told)
        elif name in PRODUCTS:
            yield from self._of_factors(name, node, parts, found, told)
        elif name in REDUCTIONS:
            yield self._reduced(name, node, parts, found)
        elif name in NORMS or has(name, Trait.ELEMENTWISE):
            for source in inputs:
                yield source, broadcast(parts, shape_of(source, values))
            if name in NORMS:
                found.mixes.append((node, node, reduced_dims(node, len(parts), NORMS[name])))
        else:
            raise UnknownError

    def _of_module(
        self, name: str, node: fx.Node, parts: Parts, found: MixedWeight, told: bool
    ) -> tuple[fx.Node, Parts]:
        """A linear that makes a weight, or a convolution of one position: its rows are the weight's."""
        source, module = node.args[0], self._module.get_submodule(str(node.target))
        before = plain(shape_of(source, self._values))
        convolves = name.startswith("conv") and "transpose" not in name
        dim = len(parts) - (int(name[-2]) if convolves else 0) - 1
        one_position = not any((*before[dim + 1 :], *parts[dim + 1 :])) and getattr(module, "groups", 1) == 1
        if not (name == "linear" or (convolves and one_position)) or kinds(parts[:dim]):
            raise UnknownError
        assert isinstance(source, fx.Node)
        if told and before[dim]:
            before = (*before[:dim], (Part(node.name, before[dim][0].size),), *before[dim + 1 :])
            found.reads.append((node, 0, dim))
        found.modules[node] = (parts[dim], before[dim])
        return source, before

    def _of_factors(
        self, name: str, node: fx.Node, parts: Parts, found: MixedWeight, told: bool
    ) -> Iterator[tuple[fx.Node, Parts]]:
        """Both operands of a product, whose dimensions are the result's, or summed over; and what is added."""
        given = factors(name, node)
        shapes = [shape_of(arg, self._values) for arg in given]
        names, out = named_dims(name, node, shapes, len(parts))
        made = dict(zip(out, parts, strict=True))
        sides: list[Parts] = []
        for own, shape in zip(names, shapes, strict=True):
            pairs = zip(own, plain(shape), shape, strict=True)
            sides.append(tuple(made.get(one, full) if size > 1 else () for one, full, size in pairs))
        summed = [one for one in names[0] if one in names[1] and one not in made]
        read = next((place for place in (0, 1) if not kinds(sides[place])), None)
        dims = [own.index(summed[0]) for own in names] if len(summed) == 1 else []
        if told and read is not None and dims and all(map(len, (sides[p][d] for p, d in enumerate(dims)))):
            for place, dim in enumerate(dims):
                own_part = (Part(node.name, shapes[place][dim]),)
                sides[place] = (*sides[place][:dim], own_part, *sides[place][dim + 1 :])
            found.reads.append((node, node.args.index(given[read]), dims[read]))
        else:
            for operand, own in zip(given, names, strict=True):
                found.whole += [(operand, d) for d, one in enumerate(own) if one not in made]
        yield from zip(given, sides, strict=True)
        bias = added(name, node)
        if bias is not None:
            yield bias, broadcast(parts, shape_of(bias, self._values))

    def _reduced(self, name: str, node: fx.Node, parts: Parts, found: MixedWeight) -> tuple[fx.Node, Parts]:
        """What a sum reads: the dimensions that are summed over may be told by others."""
        source = node.args[0]
        shape = shape_of(source, self._values)
        over = reduced_dims(node, len(shape), REDUCTIONS[name])
        assert isinstance(source, fx.Node)
        keep = len(shape_of(node, self._values)) == len(shape)
        left = [dim for d, dim in enumerate(parts) if not keep or d not in over]
        full = plain(shape)
        told = tuple(full[d] if d in over else left.pop(0) for d in range(len(shape)))
        found.mixes.append((node, source, over))
        return source, told


def fold(module: fx.GraphModule, use: fx.Node, values: Mapping[str, Any]) -> list[fx.Node]:
    """Return what a convolution reads, back to the reshape that may have written a batch's images as one."""
    path: list[fx.Node] = []
    node = use.args[0]
    while isinstance(node, fx.Node) and node.args and shape_of(node, values)[0] == 1:
        path.append(node)
        if operation_of(module, node) in RESHAPES - COPIES:
            break
        node = node.args[0]
    return path


def _images(module: fx.GraphModule, use: fx.Node, values: Mapping[str, Any]) -> int:
    """How many images lie among the channels of a convolution's input."""
    if operation_of(module, use) == "linear":
        return 1
    path = fold(module, use, values)
    images = shape_of(path[-1].args[0], values)[0] if path else 1
    return images if shape_of(use.args[0], values)[1] % images == 0 else 1
