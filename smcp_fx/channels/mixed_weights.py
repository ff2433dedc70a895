"""Weights that are computed from the input: mixtures of kernels, modulated convolutions, hypernetworks.

    w = (routing @ weight).view(b * o, i, 3, 3)       weight [experts, o * i * 9]
    y = conv2d(x.view(1, b * i, h, w), w, groups=b)
    y = bmm(linear(z).view(b, o, i), x)

Such a weight has input and output channels, like a parameter. They are followed back to the parameters that it is
computed from, where one dimension may hold several factors, and to tensors with one kind of channels (styles), which
are tied to it. The generator's input (routing, a hypernetwork's features) has its own channels, which also
lie along the remaining dimension of a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from smcp_fx.channels.weight_factors import (
    COPIES,
    PRODUCTS,
    RESHAPES,
    UNFIT,
    Factor,
    Factors,
    Part,
    Parts,
    Product,
    UnknownError,
    shape_of,
    unify,
)
from smcp_fx.channels.weight_views import is_question, weight_and_bias
from smcp_fx.tracing.constant_values import ancestors
from smcp_fx.tracing.operations import operation_of


@dataclass(frozen=True)
class Reading:
    """How a layer reads its weight ``result``, with rows for ``images`` images. Pairs: (input, output).

    ``operand``: the position of the layer's input; ``dims``: the weight's channel dimensions; ``shape``:
    its shape for one image; ``axes``: the channel dimensions of input and result.
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
class Followed:
    """The tensors that a weight is computed from, or that are computed from a weight, and their factors."""

    parts: dict[fx.Node, Parts] = field(default_factory=dict)  # of nodes with both kinds of channels
    leaves: dict[fx.Node, Parts] = field(default_factory=dict)  # of other tensors that these nodes read
    #: Operations that mix channels: (node, number of the argument, the argument's factors, dimensions mixed).
    mixes: list[tuple[fx.Node, int, Parts, tuple[int, ...]]] = field(default_factory=list)

    def describe(self, factors: Factors, nodes: Iterable[fx.Node], leaves: Iterable[fx.Node]) -> None:
        """Record the factors of these tensors, and the operations that mix channels."""
        self.parts = {node: factors.parts(node) for node in nodes}
        self.leaves = {node: factors.parts(node) for node in leaves}
        self.mixes = [(node, at, factors.parts(tensor), over) for node, at, tensor, over in factors.mixes]


@dataclass
class MixedWeight(Followed):
    """The weight that the layer ``use`` reads, and the tensors that it is computed from."""

    use: fx.Node = field(kw_only=True)
    reading: Reading = field(kw_only=True)
    parameters: list[tuple[str, Parts]] = field(default_factory=list)  # names, and factors of each dimension
    #: Products that make a weight of a generator's input: (product, number of the argument, dimension summed).
    reads: list[tuple[fx.Node, int, int]] = field(default_factory=list)


class MixedWeights:
    """Finds the weights computed from the input, by the layer that reads them.

    ``computed``: nodes that compute a weight from parameters alone, and its name; ``apart``: other nodes that may
    read the tensors on the way; ``turned``: names of layers that mix positions, not channels.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        values: Mapping[str, Any],
        computed: Mapping[str, str],
        apart: Collection[fx.Node] = (),
        turned: Collection[str] = (),
    ) -> None:
        self.module, self.values, self.computed, self.apart = module, values, computed, apart
        self.turned = turned
        self.order = {node: place for place, node in enumerate(module.graph.nodes)}

    def by_layer(self, excluded: Collection[str]) -> dict[fx.Node, MixedWeight]:
        """All weights computed from the input. Layers that read a parameter or an ``excluded`` node are left out."""
        weights: dict[fx.Node, MixedWeight] = {}
        for use in (node for node in self.order if node.name not in self.turned):
            for reading in self._readings(use):
                result = reading.result
                if result.name in excluded or result.op in ("get_attr", "placeholder") or use in weights:
                    continue
                for with_input in (True, False):  # if following the generator's input fails, retry without it
                    try:
                        weights[use] = _Walk(self, use, reading, with_input).followed()
                        break
                    except UNFIT:
                        continue
        return weights

    # ---- layers -----------------------------------------------------------------------------------------

    def _readings(self, use: fx.Node) -> Iterator[Reading]:
        """The ways in which a node may read a weight as a layer."""
        name = operation_of(self.module, use) or ""
        try:
            if use.op == "call_function" and (name.startswith("conv") or name == "linear"):
                yield from self._of_layer(name, use)
            elif use.op != "call_module" and name in PRODUCTS and name != "linear":
                for place in (0, 1):
                    yield from self._of_product(use, place)
        except UNFIT:
            return

    def _of_layer(self, name: str, use: fx.Node) -> Iterator[Reading]:
        weight = weight_and_bias(use)[0]
        shape = shape_of(weight, self.values)
        images = _images(self.module, use, self.values)
        if shape[0] % images or shape[1] == 1:
            return
        first, second = ("in", "out") if "transpose" in name else ("out", "in")
        rows = (Part("", images), Part(first, shape[0] // images))
        kernel = tuple((Part("", size),) for size in shape[2:])
        parts = (rows if images > 1 else rows[1:], (Part(second, shape[1]),), *kernel)
        axis = len(shape_of(use.args[0], self.values)) - len(shape) + 1
        whole = (shape[0] // images, *shape[1:])
        dims = (0, 1) if "transpose" in name else (1, 0)
        yield Reading(weight, 0, images, parts, whole, dims, (axis, axis))

    def _of_product(self, use: fx.Node, place: int) -> Iterator[Reading]:
        """A product that sums over one dimension of a computed matrix and keeps another in its result."""
        product = Product(self.module, self.values, use)
        out, summed = product.out, product.summed
        own, others = product.names[place], product.names[1 - place]
        made = [n for n in own if n in out and n not in others]
        if len(summed) != 1 or len(made) != 1 or not set(own + others) <= {*out, *summed}:
            return
        kind = {summed[0]: "in", made[0]: "out"}
        sizes = dict(zip(own, product.shapes[place], strict=True))
        if min(sizes[n] for n in kind) == 1:
            return
        parts = tuple((Part(kind.get(n, ""), size),) if size > 1 else () for n, size in sizes.items())
        whole = tuple(size if n in kind else 1 for n, size in sizes.items())
        dims = own.index(summed[0]), own.index(made[0])
        axes = others.index(summed[0]), out.index(made[0])
        order = tuple(others.index(n if n in others else summed[0]) for n in out)
        other = use.args.index(product.operands[1 - place])
        yield Reading(product.operands[place], other, 1, parts, whole, dims, axes, order)


class _Walk:
    """Follows a layer's weight back; ``with_input``: also the channels of the generator's input."""

    def __init__(self, among: MixedWeights, use: fx.Node, reading: Reading, with_input: bool) -> None:
        self.among, self.with_input = among, with_input
        self.factors = Factors(among.module, among.values)
        self.factors.bind(reading.result, reading.parts)
        self.weight = MixedWeight(use=use, reading=reading)
        self.linears: dict[fx.Node, int] = {}  # for each, the dimension of the result that its rows make

    def followed(self) -> MixedWeight:
        """Go back, last nodes first, while tensors have both kinds of channels; `UnknownError` if that fails."""
        among, factors, weight = self.among, self.factors, self.weight
        result = weight.reading.result
        todo, through = {result}, {result}
        nodes, leaves = dict[fx.Node, None](), dict[fx.Node, None]()
        while todo:
            node = max(todo, key=among.order.__getitem__)
            todo.remove(node)
            if len(factors.kinds(node)) < 2 and node not in through:
                leaves[node] = None
                continue
            others = {user for user in node.users if not is_question(user)} - nodes.keys()
            others -= {weight.use, *among.apart}
            if others:  # the norm that a weight is divided by is computed from that weight
                crossed = {leaf for leaf in leaves if not others.isdisjoint(ancestors(leaf))}
                if not crossed:
                    raise UnknownError
                leaves = {leaf: None for leaf in leaves if leaf not in crossed}
                through |= crossed
                todo |= {node, *crossed}
                continue
            nodes[node] = None
            if node.op != "get_attr" and node.name not in among.computed:
                todo.update({*self._relate(node)} - nodes.keys() - leaves.keys())
        weight.describe(factors, nodes, leaves)
        for node in nodes:
            if node.op == "get_attr" or node.name in among.computed:
                name = among.computed.get(node.name, str(node.target))
                weight.parameters.append((name, weight.parts[node]))
        for node, dim in self.linears.items():
            rows, columns = factors.parts(node)[dim], factors.parts(node.args[0])[dim]  # type: ignore[arg-type]
            weight.parameters.append((f"{node.target}.weight", (rows, columns)))
            if among.module.get_submodule(str(node.target)).bias is not None:
                weight.parameters.append((f"{node.target}.bias", (rows,)))
        for node, _, tensor, over in factors.mixes:
            summed = operation_of(among.module, node) in PRODUCTS
            if len(factors.kinds(tensor, over) - {node.name}) > (not summed):
                raise UnknownError
        if any(len(factors.kinds(leaf)) > 1 for leaf in leaves) or not weight.parameters:
            raise UnknownError
        return weight

    def _relate(self, node: fx.Node) -> list[fx.Node]:
        """Equate the factors of a node's result with those of its operands; returns the operands."""
        is_module = node.op == "call_module"
        sources = [self._of_module(node)] if is_module else self.factors.relate(node)
        if is_module or operation_of(self.among.module, node) in PRODUCTS:
            _, at, tensor, over = self.factors.mixes[-1]
            line = self.factors.of(tensor)[over[0]] if len(over) == 1 else []
            if self.with_input and line and not self.factors.kinds(tensor):
                unify(line, [Factor(shape_of(tensor, self.among.values)[over[0]], node.name)])
                self.weight.reads.append((node, at, over[0]))
        return sources

    def _of_module(self, node: fx.Node) -> fx.Node:
        """The input of a linear, or of a convolution at one position, whose rows become a weight."""
        name, source = operation_of(self.among.module, node) or "", node.args[0]
        convolves = name.startswith("conv") and "transpose" not in name
        before, made = self.factors.of(source), self.factors.of(node)
        dim = len(made) - (int(name[-2]) if convolves else 0) - 1
        groups = getattr(self.among.module.get_submodule(str(node.target)), "groups", 1)
        if any((*before[dim + 1 :], *made[dim + 1 :])) or groups != 1 or not (name == "linear" or convolves):
            raise UnknownError
        if self.factors.kinds(node, range(dim)):
            raise UnknownError
        assert isinstance(source, fx.Node)
        self.linears[node] = dim
        self.factors.mixes.append((node, 0, source, (dim,)))
        return source


def fold(module: fx.GraphModule, use: fx.Node, values: Mapping[str, Any]) -> list[fx.Node]:
    """The nodes from a convolution's input back to the reshape that may have merged the batch into one image."""
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
