"""One graph from the two that a model gives in `eval()` and in `train()`.

What both do is there once. Where the two differ only in a flag, the flag becomes a node that reads the owning
module's own `training`; where they run other operations, each mode's own stand beside each other, and `by_mode` nodes
take one of the two where the modes come together again (`smcp_fx.tracing.modes`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import count
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import TraceError
from smcp_fx.tracing.contexts import NO_GRAD, same_mode
from smcp_fx.tracing.modes import ALWAYS, by_mode, conditions, with_branches
from smcp_fx.tracing.operations import writes_in_place
from smcp_fx.tracing.values import OPAQUE, TensorInfo


@dataclass
class ModeTrace:
    """A model's graph in one mode, and which module's `training` was read when so many nodes had been made.

    ``values`` are its nodes' on the example inputs, where the two modes' graphs have to be told apart.
    """

    graph: fx.Graph
    place: dict[fx.Node, int]
    reads: list[tuple[int, str]]
    values: dict[str, Any] = field(default_factory=dict)

    def reader(self, node: fx.Node) -> str:
        """The module whose flag the node was given: the one read just before, or the last in whose forward it is."""
        known = self._known(node)
        if known and known[-1][0] == self.place.get(node, 0):
            return known[-1][1]
        return self._last(node)

    def decides(self, node: fx.Node) -> str:
        """The module that let the node be made: the last whose flag was read before, in whose forward the node is."""
        place, around = self.place.get(node, 0), _around(node)
        here = [path for at, path in self._known(node) if at == place and path in around]
        if here:  # of several, the outermost: what is inside was reached since that one let it
            return min(here, key=len)
        parts = [path for at, path in self._known(node) if at == place and path.rpartition(".")[0] in around]
        return parts[-1] if parts else self._last(node)

    def _last(self, node: fx.Node) -> str:
        return next((path for _, path in reversed(self._known(node)) if path in _around(node)), "")

    def _known(self, node: fx.Node) -> list[tuple[int, str]]:
        return self.reads[: bisect_right(self.reads, self.place.get(node, 0), key=lambda read: read[0])]


class ReadsOfTraining:
    """While it is entered, notes whose `training` is read; ``now`` tells how many nodes there are by then."""

    def __init__(self, model: nn.Module, now: Any) -> None:
        self.found: list[tuple[int, str]] = []
        self._now = now
        self._paths = {id(module): path for path, module in model.named_modules()}

    def __enter__(self) -> ReadsOfTraining:
        def read(module: nn.Module) -> bool:
            try:
                value: bool = vars(module)["training"]
            except KeyError:  # a scripted module, which keeps it elsewhere
                raise AttributeError("training") from None
            if id(module) in self._paths and (now := self._now()) is not None:
                self.found.append((now, self._paths[id(module)]))
            return value

        def write(module: nn.Module, value: bool) -> None:
            if id(module) in self._paths and self._now() is not None and vars(module)["training"] != value:
                raise TraceError(
                    f"forward puts {self._paths[id(module)]!r} into {'train' if value else 'eval'} mode, which a "
                    "graph does not do; do so in the train() method of the module that holds it."
                )
            vars(module)["training"] = value

        nn.Module.training = property(read, write)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        del nn.Module.training


def differ_in_flags(model: nn.Module, one: ModeTrace, other: ModeTrace) -> bool:
    """Do the modes run the same operations? What is False in one and True in the other becomes a node then."""
    flagged = _differences(model, one.graph, other.graph)
    for e, index in flagged or ():
        _set_leaf(e, index, _flag(one.graph, one.reader(e)))
    return flagged is not None


def alike(model: nn.Module, one: fx.Graph, other: fx.Graph) -> bool:
    """Do two traces of one mode run the same operations on the same numbers?"""
    return _differences(model, one, other) == []


def _differences(
    model: nn.Module, evaluated: fx.Graph, trained: fx.Graph
) -> list[tuple[fx.Node, int]] | None:
    """Where one graph has False and the other True; None when they differ in more."""
    if len(evaluated.nodes) != len(trained.nodes):
        return None
    pairs = list(zip(evaluated.nodes, trained.nodes, strict=True))
    counterpart = {t: e for e, t in pairs}
    flagged = []
    for e, t in pairs:
        left, right = _leaves(e), _leaves(t)
        if e.op != t.op or _structure(e) != _structure(t):
            return None
        if e.target != t.target and _constant(model, e) != _constant(model, t, None):
            return None
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            if isinstance(b, fx.Node):
                if counterpart[b] is not a:
                    return None
            elif a is False and b is True:
                flagged.append((e, index))
            elif not _same(a, b):
                return None
    return flagged


def both_modes(model: nn.Module, evaluated: ModeTrace, trained: ModeTrace) -> fx.Graph:
    """Put what only training does into the graph of eval mode, each mode's own nodes in the order it runs them."""
    return _Merger(model, evaluated, trained).merge()


class _Merger:
    def __init__(self, model: nn.Module, evaluated: ModeTrace, trained: ModeTrace) -> None:
        self.model = model
        self.sides = {False: evaluated, True: trained}
        self.graph = evaluated.graph
        self.placed: dict[fx.Node, fx.Node] = {}  # of the trained graph's nodes, in the merged one
        self.owner: dict[fx.Node, str] = {}  # of merged nodes that one mode runs: whose flag decides
        self.made: dict[tuple[str, Any, Any], fx.Node] = {}

    def merge(self) -> fx.Graph:
        before = next(iter(self.graph.nodes))  # the last node that is placed
        both = []
        for own, other, pair in self._aligned():
            owner = self._decides(own, other)
            self.owner.update(dict.fromkeys(own, owner))
            before = own[-1] if own else before
            for node in other:
                with self.graph.inserting_after(before):
                    copied = self.graph.node_copy(node, lambda n: self.placed[n])
                self.placed[node] = before = copied
                self.owner[copied] = owner
                if self._has_effect(node):
                    before = self._for_its_effect(copied, owner, (None, copied))
            for node in own:
                if self._has_effect(node):
                    end = self._for_its_effect(node, owner, (node, None))
                    before = end if before is node else before
            if pair is not None:
                self.placed[pair[1]] = pair[0]
                same_mode(*pair)
                self._unite(*pair)
                before = pair[0]
                both.append(pair[0])
        self._keep(both)
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        for flag in [node for node in self.graph.nodes if _is_flag(node)]:
            last.append(flag)
        return with_branches(self.graph)

    # ---- which nodes are one ----------------------------------------------------------------------------

    def _aligned(self) -> Iterator[tuple[list[fx.Node], list[fx.Node], tuple[fx.Node, fx.Node] | None]]:
        """The nodes of eval mode alone, those of train mode alone, and the pair that both run behind them."""
        listed = [list(side.graph.nodes) for side in self.sides.values()]
        keys = [
            [self._key(node, side) for node in nodes]
            for nodes, side in zip(listed, self.sides.values(), strict=True)
        ]
        numbers: dict[Any, int] = {}
        first, second = ([numbers.setdefault(key, len(numbers)) for key in line] for line in keys)
        left = right = 0
        for a, b, size in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
            for offset in range(size):
                own, other = listed[0][left : a + offset], listed[1][right : b + offset]
                yield own, other, (listed[0][a + offset], listed[1][b + offset])
                left, right = a + offset + 1, b + offset + 1
        yield listed[0][left:], listed[1][right:], None

    def _key(self, node: fx.Node, side: ModeTrace) -> Any:
        """Equal for nodes that do the same to tensors of the same shapes for the same module."""
        if node.op == "output":
            return "output"
        plain = [
            _shapes(side.values[leaf.name])
            if isinstance(leaf, fx.Node)
            else "flag"
            if isinstance(leaf, bool)
            else repr(leaf)
            for leaf in _leaves(node)
        ]
        target = _constant(self.model, node) if node.op == "get_attr" else node.target
        shapes = _shapes(side.values[node.name])
        return node.op, target, _innermost(node), tuple(plain), _structure(node), shapes

    # ---- where they come together -----------------------------------------------------------------------

    def _unite(self, node: fx.Node, trained: fx.Node) -> None:
        """Let a node that both modes run read what each of them gives it."""
        left, right = _leaves(node), _leaves(trained)
        if _structure(node) != _structure(trained):  # outputs of two structures
            result = fx.node.map_arg(trained.args[0], lambda n: self.placed[n])
            node.args = (self._choice(node, "", node.args[0], result),)
            return
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            found = self.placed[b] if isinstance(b, fx.Node) else b
            if isinstance(found, fx.Node) or isinstance(a, fx.Node):
                if found is not a:
                    _set_leaf(node, index, self._choice(node, self._between(node, a, found), a, found))
            elif a is False and found is True:
                _set_leaf(node, index, _flag(self.graph, self.sides[False].reader(node)))
            elif not _same(a, found):
                _set_leaf(node, index, self._choice(node, self._between(node, a, found), a, found))

    def _choice(self, node: fx.Node, owner: str, evaluated: Any, trained: Any) -> fx.Node:
        key = owner, _hashable(evaluated), _hashable(trained)
        if key not in self.made:
            flag = _flag(self.graph, owner)
            with self.graph.inserting_before(node):
                self.made[key] = self.graph.call_function(by_mode, (flag, evaluated, trained))
            if node.op != "output":
                self.made[key].meta = _meta(node)
        return self.made[key]

    def _has_effect(self, node: fx.Node) -> bool:
        return node.op.startswith("call") and (not node.users or writes_in_place(node, self.model))

    def _for_its_effect(self, node: fx.Node, owner: str, sides: tuple[Any, Any]) -> fx.Node:
        """Say in which mode a node runs that nothing reads, or that changes what others read."""
        flag = _flag(self.graph, owner)
        with self.graph.inserting_after(node):
            end = self.graph.call_function(by_mode, (flag, *sides))
        end.meta = _meta(node)
        return end

    def _keep(self, both: list[fx.Node]) -> None:
        """What both modes do they do, whether both need it or not: a batch norm counts, a random number is drawn."""
        when = conditions(self.graph.nodes)
        kept: set[fx.Node] = set()
        for node in reversed(both):
            if node.op.startswith("call") and when[node] != ALWAYS:
                if kept.isdisjoint(node.users):
                    self._for_its_effect(node, "", (node, node))
                kept.add(node)

    # ---- whose flag decides -----------------------------------------------------------------------------

    def _between(self, node: fx.Node, evaluated: Any, trained: Any) -> str:
        for operand in (trained, evaluated):
            if isinstance(operand, fx.Node) and operand in self.owner:
                return self.owner[operand]
        return self._reader(node, False)

    def _decides(self, own: list[fx.Node], other: list[fx.Node]) -> str:
        if other:
            return self._reader(other[0], True)
        return self._reader(own[0], False) if own else ""

    def _reader(self, node: fx.Node, training: bool) -> str:
        """The module whose flag was read last before the node was made, and in whose forward that was."""
        return self.sides[training].decides(node)


def _meta(node: fx.Node) -> dict[str, Any]:
    """What a choice says of itself: it is neither run without gradients nor opaque, whatever it chooses for."""
    return {key: value for key, value in node.meta.items() if key not in (NO_GRAD, OPAQUE)}


def _flag(graph: fx.Graph, owner: str) -> fx.Node:
    """The node that reads `training` of a module."""
    target = f"{owner}.training" if owner else "training"
    for other in graph.nodes:
        if other.op == "get_attr" and other.target == target:
            found: fx.Node = other
            return found
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        return graph.create_node("get_attr", target)


def _innermost(node: fx.Node) -> str:
    """The innermost module whose forward made the node."""
    return ["", *_stack(node)][-1]


def _around(node: fx.Node) -> set[str]:
    return {"", *_stack(node)}


def _stack(node: fx.Node) -> list[str]:
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _constant(model: nn.Module, node: fx.Node, otherwise: Any = "") -> Any:
    """What a `get_attr` reads; tensors made in `forward` by their values, since the tracer names them by mode."""
    if node.op != "get_attr" or not str(node.target).startswith("_tensor_constant"):
        return node.target if node.op == "get_attr" else otherwise
    held = getattr(model, str(node.target))
    if not isinstance(held, Tensor):
        return node.target
    return str(held.dtype), tuple(held.shape), repr(held.tolist())


def _shapes(value: Any) -> Any:
    leaves, spec = pytree.tree_flatten(value)
    plain = [(leaf.shape, leaf.dtype) if isinstance(leaf, TensorInfo) else type(leaf) for leaf in leaves]
    return tuple(plain), repr(spec)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b or (a != a and b != b))  # NaN is itself here


def _leaves(node: fx.Node) -> list[Any]:
    """A node's arguments, taken apart; those inside slices, too."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found


def _structure(node: fx.Node) -> str:
    return repr(fx.node.map_aggregate((node.args, node.kwargs), lambda _: None))


def _set_leaf(node: fx.Node, index: int, value: Any) -> None:
    places = count()
    node.args, node.kwargs = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda leaf: value if next(places) == index else leaf
    )


def _hashable(tree: Any) -> Any:
    return tree if isinstance(tree, fx.Node) else repr(tree)


def _is_flag(node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target).rpartition(".")[2] == "training"
