"""Weights and biases that are computed from parameters each time the network runs.

    before   w = weight_norm(weight_v, weight_g);  conv2d(x, w, bias)        w = weight * mask;  linear(x, w)

Weight and spectral norm, parametrisations, weight standardisation, masks, sums of kernels, slices of a larger weight:
all are functions of parameters only. The channel graph treats the result as a weight like any other;
converting replaces the function by its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.channels.cosines import is_cosine
from smcp_fx.channels.weight_views import factors, is_layer, is_question, parameter_views, weight_and_bias
from smcp_fx.masking.kept_statistics import BEFORE, IN_PLACE_OF
from smcp_fx.masking.masks import STATE
from smcp_fx.tracing.aliases import memory_of_model, written_buffers
from smcp_fx.tracing.autograd_functions import Applied
from smcp_fx.tracing.constant_values import ancestors, computed_value
from smcp_fx.tracing.modes import is_by_mode
from smcp_fx.tracing.operations import operation_name, operation_of, writes_in_place
from smcp_fx.tracing.own_weights import own_weight, owner_of
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import held, is_continuous

Shape = tuple[int, ...]
#: Random results differ at each call, so that no value can be stored.
_DRAWS = ("dropout", "rand", "bernoulli", "multinomial", "poisson", "stochasticdepth")


@dataclass(frozen=True)
class ComputedWeight:
    """``result`` computes the weight through the nodes ``through``; ``name``: where the value can be stored."""

    result: fx.Node
    name: str
    shape: Shape
    through: tuple[fx.Node, ...]  # in the order they run, the reads of parameters and ``result`` among them
    alone: frozenset[fx.Node]  # those nodes of ``through`` that only computed weights read
    sources: tuple[str, ...]  # the parameters and buffers that it is computed from
    unread: frozenset[str]  # those sources that only computed weights read

    def source(self, module: nn.Module) -> str:
        """The parameter whose gradients tell whether the weight learns."""
        learning = (name for name in self.sources if held(module, name).requires_grad)
        return next(learning, next(iter(self.sources), self.name))


def computed_weights(
    module: fx.GraphModule,
    shape_of: Callable[[fx.Node], Shape | None],
    transparent: tuple[Callable[..., object], ...] = (),
    *,
    cosines: bool = False,
) -> list[ComputedWeight]:
    """Find the computed weights. ``transparent``: functions that may stand between a weight and its layer (masks).

    ``cosines``: include the weights of cosines, with the norms of the channels kept now.
    """
    passing = (*transparent, IN_PLACE_OF["normalize"], *BEFORE.values()) if cosines else transparent
    watching = _watching(module, passing)
    constants = _constants(module, passing, watching)
    weights: dict[fx.Node, Shape] = {}
    refused = set(parameter_views(module, lambda node: shape_of(node) if node in constants else None))
    for use in module.graph.nodes:
        if use in constants:  # kernels that are fused with kernels
            continue
        for result in _weights_of(use, constants, transparent):
            if result in weights or result in refused:
                continue
            readers = [user for user in result.users if not is_question(user)]
            alike = all(
                user.target in transparent or result in _weights_of(user, constants, transparent)
                for user in readers
            )
            cosine = not cosines and is_cosine(module, use, result)
            shape = shape_of(result) if alike and not cosine else None
            if shape:
                weights[result] = shape
            else:
                refused.add(result)
    return _described(module, weights, watching) if weights else []


# ---- what is computed from parameters alone -----------------------------------------------------------------


def _watching(module: fx.GraphModule, transparent: tuple[Callable[..., object], ...]) -> dict[fx.Node, str]:
    """The nodes that write statistics of parameters into buffers (ranges of weights), with the buffer's name."""
    memory = memory_of_model(module, module.graph)
    writes = {
        node: memory[node.args[0]]
        for node in module.graph.nodes
        if node.args and node.args[0] in memory and writes_in_place(node, module)
    }
    buffers = written_buffers(module)
    watching = {node: name for node, name in writes.items() if name in buffers}
    while watching:
        constants = _constants(module, transparent, watching)
        lost = {name for node, name in watching.items() if not constants.issuperset(node.all_input_nodes)}
        lost |= {
            name
            for node, name in watching.items()
            if any(not (_is_effect(user) or user in watching) for user in node.users)
        }
        if not lost:
            break
        watching = {node: name for node, name in watching.items() if name not in lost}
    return watching


def _is_effect(node: fx.Node) -> bool:
    """Does the node only say in which mode a write runs?"""
    return is_by_mode(node) and not node.users


def _constants(
    module: fx.GraphModule,
    transparent: tuple[Callable[..., object], ...],
    watching: Mapping[fx.Node, str],
) -> set[fx.Node]:
    """The nodes computed from parameters and buffers only that are not random and are not written into.

    Buffers that the nodes of ``watching`` write into count as constant, too.
    """
    constants: set[fx.Node] = set()
    written = written_buffers(module) - set(watching.values())
    owners = dict(module.named_modules())
    for node in module.graph.nodes:
        if node.target in written or any(
            user.args[:1] == (node,) and writes_in_place(user, module) and user not in watching
            for user in node.users
        ):
            continue
        if node.op == "get_attr":
            constants.add(node)
        elif node.op == "call_module" and not node.all_input_nodes:
            if owner_of(node) is not None:
                constants.add(node)
        elif node.op != "output" and node.all_input_nodes:
            name = operation_of(module, node)
            drawn = any(word in (name or "") for word in _DRAWS) or has(name, Trait.DRAWN)
            drawn |= (name or "").endswith("normal")  # not `normalize`
            followed = name is not None or isinstance(node.target, Applied)
            followed |= node.target in (own_weight, *transparent)
            if node.op == "call_module":
                followed = has(name, Trait.ELEMENTWISE) and not [*owners[str(node.target)].state_dict()]
            fixed = constants.issuperset(node.all_input_nodes)
            if followed and not drawn and fixed and _is_steady(module, node):
                constants.add(node)
    return constants


def _is_steady(module: fx.GraphModule, node: fx.Node) -> bool:
    """Does the node give the same result twice? An autograd function may draw random numbers inside."""
    if not isinstance(node.target, Applied):
        return True
    way = ancestors(node)
    ordered = tuple(other for other in module.graph.nodes if other in way)
    with torch.no_grad(), torch.random.fork_rng():
        first, second = (computed_value(module, ordered) for _ in range(2))
    return isinstance(first, torch.Tensor) and torch.equal(first, second)


def _weights_of(
    use: fx.Node, constants: set[fx.Node], transparent: tuple[Callable[..., object], ...]
) -> list[fx.Node]:
    """The computed nodes that the use reads as a layer's weight or bias, or as a product's constant factor."""
    if is_layer(use):
        operands: list[Any] = [*weight_and_bias(use)]
        most = 2
    else:
        operands, most = [*factors(use)] if _is_layer_like(use) else [], 1
    weights = []
    for one in operands:
        while isinstance(one, fx.Node) and one.target in transparent:
            one = one.args[0]
        if isinstance(one, fx.Node) and one in constants:
            weights.append(one)
    return [one for one in weights if one.op != "get_attr"] if len(weights) <= most else []


def _is_layer_like(use: fx.Node) -> bool:
    """Does the product sum only over dimensions that both factors have?"""
    if operation_name(use, None) != "einsum":
        return True
    inputs, _, out = str(use.args[0]).replace(" ", "").partition("->")
    names = inputs.split(",")
    return len(names) == 2 and set(names[0]) ^ set(names[1]) <= set(out)


def _described(
    module: fx.GraphModule, results: dict[fx.Node, Shape], watching: Mapping[fx.Node, str]
) -> list[ComputedWeight]:
    ways = {result: ancestors(result) for result in results}
    while True:
        ways = {result: way | _written_beside(way, watching) for result, way in ways.items()}
        every = [node for node in reversed(module.graph.nodes) if any(node in way for way in ways.values())]
        alone: set[fx.Node] = set()
        for node in every:
            if node in results or all(user in alone for user in node.users):
                alone.add(node)
        # A buffer with other readers must still be written.
        watched = set(watching.values())
        read = {
            node.target
            for node in module.graph.nodes
            if node.op == "get_attr" and node.target in watched
            for user in node.users.keys() - alone
            if not is_question(user) and (user.users or user.op == "output" or writes_in_place(user, module))
        }
        if not read:
            break
        watching = {node: name for node, name in watching.items() if name not in read}
        ways = {result: ancestors(result) for result in results}
    reads, described = _Reads(module), []
    taken: set[str] = set()
    names: dict[Any, str] = {}
    expressions = _expressions(reversed(every))
    for result, shape in results.items():
        ordered = tuple(node for node in reversed(every) if node in ways[result])
        every_source = (name for node in ordered for name in reads.of(node))
        sources = dict.fromkeys(name for name in every_source if not name.startswith(f"{STATE}."))  # no masks
        floating = [name for name in sources if is_continuous(held(module, name))]
        unread = frozenset(name for name in sources if not reads.outside(name, alone))
        parameters = [name for name in floating if isinstance(held(module, name), nn.Parameter)]
        if expressions[result] not in names:  # two equal computations are one weight
            names[expressions[result]] = _name(module, result, shape, floating, unread, taken)
        name = names[expressions[result]]
        taken.add(name)
        kept = tuple(parameters or floating)
        described.append(
            ComputedWeight(result, name, shape, ordered, frozenset(alone & ways[result]), kept, unread)
        )
    return described


def _written_beside(way: frozenset[fx.Node], watching: Mapping[fx.Node, str]) -> frozenset[fx.Node]:
    """The writes into the buffers that are read on the way, and the nodes that they are computed from."""
    read = {node.target for node in way if node.op == "get_attr"}
    writes = [node for node, name in watching.items() if name in read]
    return frozenset().union(*(ancestors(end) for node in writes for end in (node, *node.users)))


def _expressions(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """A number for each node; equal computations on the same parameters have the same number."""
    numbers: dict[str, int] = {}
    numbered: dict[fx.Node, int] = {}
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbered[n]}")
        said = f"{node.op} {node.target if isinstance(node.target, str) else id(node.target)} {args} {kwargs}"
        numbered[node] = numbers.setdefault(said, len(numbers))
    return numbered


def _name(
    module: fx.GraphModule,
    result: fx.Node,
    shape: Shape,
    sources: list[str],
    unread: frozenset[str],
    taken: set[str],
) -> str:
    """Name a weight: its module's name for it; else a source parameter of its shape; else a new name."""
    own = owner_of(result)
    fitting = [n for n in sources if n in unread and tuple(held(module, n).shape) == shape]
    parameters = [n for n in fitting if isinstance(held(module, n), nn.Parameter)]
    fitting = [n for n in parameters if held(module, n).requires_grad] + parameters
    for name in ([own] if own is not None else []) + fitting:
        if name not in taken:
            return name
    path: list[str] = []  # beside its sources
    for parts in zip(*(name.split(".")[:-1] for name in sources), strict=False):
        if len(set(parts)) > 1:
            break
        path.append(parts[0])
    return ".".join([*path, f"{result.name}_value"])


class _Reads:
    """Which nodes read which parameters and buffers, under any of their names."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._readers: dict[int, set[fx.Node]] = {}
        for node in module.graph.nodes:
            if node.op != "get_attr" or node.users:
                for name in self.of(node):
                    self._readers.setdefault(id(held(module, name)), set()).add(node)

    def of(self, node: fx.Node) -> Iterator[str]:
        """The names of the tensors that a node reads from the model."""
        value: Any = None
        if node.op == "get_attr":
            value = held(self._module, str(node.target))
        elif node.op == "call_module":
            value = self._module.get_submodule(str(node.target))
        if isinstance(value, torch.Tensor):
            yield str(node.target)
        if isinstance(value, nn.Module) and not all(
            user.target is own_weight for user in node.users or [node]
        ):
            yield from (f"{node.target}.{name}" for name in _names(value))
        if node.target is own_weight:
            owner: Any = node.args[0]
            start = f"{node.args[1]}_"
            names = _names(self._module.get_submodule(str(owner.target)))
            yield from (f"{owner.target}.{name}" for name in names if name.startswith(start))

    def outside(self, name: str, alone: set[fx.Node]) -> bool:
        """Does a node outside ``alone`` read the tensor?"""
        return not self._readers.get(id(held(self._module, name)), set()) <= alone


def _names(module: nn.Module) -> list[str]:
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [name for each in tensors for name, _ in each]
