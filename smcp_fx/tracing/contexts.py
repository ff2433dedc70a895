"""Contexts that a forward enters: operations without gradients, or without autocast, stay so.

    before   with torch.no_grad():            after    f = self.back(x)
                 f = self.back(x)                      detach = f.detach()
             return self.head(f)                       return self.head(detach)

Tracing enters the contexts, so autograd's mode can be read when each node is made, however it was set. A tensor made
without gradients and read with gradients is detached in between, which keeps all numbers and gradients. Layers inside
are pinned, since no gradient measures their channels.

Where a forward switches autocast off, the graph's code switches it off around the same nodes. Where a module
switches it on, each operation gets its own precision, and the masked network would differ from the sliced one by
rounding: the module stays a call or, if it holds most of the model, is split into regions.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from smcp_fx.errors import TraceError
from smcp_fx.tracing.aliases import memory_of_model
from smcp_fx.tracing.mode_reads import made_beside, returned_instead
from smcp_fx.tracing.modes import ModeInterpreter
from smcp_fx.tracing.operations import operation_name, operation_of, readable_name, writes_in_place
from smcp_fx.tracing.traits import Trait, has
from smcp_fx.tracing.values import FROZEN, NO_AUTOCAST, TensorInfo, has_tensors, held

#: Marks nodes that were made while autograd was off.
NO_GRAD = "smcp_no_grad"
_FROZEN = "runs without gradients, so that nothing tells what its channels are worth"


class AutocastError(TraceError):
    """The modules of these ``paths`` switch autocast on."""

    def __init__(self, paths: set[str]) -> None:
        self.paths = paths
        names = ", ".join(repr(path) if path else "the model itself" for path in sorted(paths))
        super().__init__(
            f"The forward of {names} enters `torch.autocast`, which a graph would lose. Enter it around the "
            "model, or move what needs another precision into a module of its own, which is then called as it is."
        )

    def by_themselves(self, model: nn.Module) -> bool:
        """Are the modules small parts of the model, which may stay calls?"""
        inside = [p for path in self.paths for p in model.get_submodule(path).parameters()]
        whole = sum(p.numel() for p in model.parameters())
        return "" not in self.paths and 2 * sum(p.numel() for p in inside) < whole


class Contexts:
    """The contexts entered while one model is traced, in the thread that traces it."""

    def __init__(self) -> None:
        self.path = ""  # of the module whose forward runs
        self.autocast: set[str] = set()
        self._entered: list[tuple[str, bool]] = []
        self._plain = False  # switching gradients off has no effect
        self._thread = threading.get_ident()

    @property
    def elsewhere(self) -> bool:
        """Is this another thread, whose modules do not belong to the trace?"""
        return threading.get_ident() != self._thread

    def note(self, node: fx.Node) -> None:
        """Tag a new node with the present contexts."""
        if not (torch.is_grad_enabled() or self._plain):
            node.meta[NO_GRAD] = True
        for path, enabled in self._entered[-1:]:
            if enabled:
                self.autocast.add(path)
            else:
                node.meta[NO_AUTOCAST] = True

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """Nodes made inside have gradients, even if code inside switches them off; not if they are off already."""
        before, self._plain = self._plain, self._plain or torch.is_grad_enabled()
        try:
            yield
        finally:
            self._plain = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch where autocast is entered and left."""
        kind = torch.amp.autocast_mode.autocast
        signature = inspect.signature(kind.__init__)
        make, enter, leave = kind.__init__, kind.__enter__, kind.__exit__
        asked: dict[int, bool] = {}
        kept: list[Any] = []  # so that no other context gets its id

        def made(context: Any, *args: Any, **kwargs: Any) -> None:
            make(context, *args, **kwargs)
            kept.append(context)
            asked[id(context)] = bool(signature.bind(context, *args, **kwargs).arguments.get("enabled", True))

        def entered(context: Any) -> Any:
            if not self.elsewhere:
                # without a GPU torch switches CUDA's autocast off, whatever was asked
                enabled = asked.get(id(context), context._enabled or context.device != "cpu")
                self._entered.append((self.path, enabled))
            return enter(context)  # type: ignore[no-untyped-call]

        def left(context: Any, *error: Any) -> Any:
            if not self.elsewhere:
                self._entered.pop()
            return leave(context, *error)

        with mock.patch.multiple(kind, __init__=made, __enter__=entered, __exit__=left):
            yield


def same_gradients(node: fx.Node, others: Iterable[fx.Node]) -> None:
    """Let a node that replaces these run without gradients if all of them do."""
    node.meta.pop(NO_GRAD, None)
    node.meta |= {NO_GRAD: True} if all(NO_GRAD in other.meta for other in others) else {}


class _Returned(ModeInterpreter):
    """Finds the operations that return their operand itself, which keeps its gradient."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.operand: dict[fx.Node, fx.Node] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and NO_GRAD in n.meta:
            operands = [node for node in n.all_input_nodes if self.env.get(node) is result]
            self.operand |= {n: operands[0]} if operands else {}
        return result


def detach_frozen(
    traced: fx.GraphModule, values: dict[str, Any], run: Callable[[Callable[..., Any]], Any]
) -> None:
    """Detach tensors made without gradients, if nodes with gradients read them.

    ``values`` are those of the nodes; ``run`` calls a function on the example inputs, the model in eval mode.
    Raises `TraceError` for an operation without gradients that writes into a tensor with gradients.
    """
    graph = traced.graph
    frozen = set(without_gradients(graph))
    returned = _operands(traced, run)
    memory = memory_of_model(traced, graph)
    state = {node for node, name in memory.items() if not held(traced, name).requires_grad}
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if node in frozen and source in state and writes_in_place(node, traced):
            for operand in [
                one for one in node.all_input_nodes if one not in state and _is_tensor(values, one)
            ]:
                with graph.inserting_before(node):
                    detached = _detached(graph, operand, values)
                made_beside(node, detached)
                node.replace_input_with(operand, detached)
        elif node in frozen and writes_in_place(node, traced) and source not in frozen:
            raise TraceError(
                f"{readable_name(node)} writes, under torch.no_grad(), into {source}, which has gradients: write it "
                "out of place, or move it into a module that is named in prepare(..., leaves=[...])."
            )
        if node in frozen and node in returned and returned[node] not in frozen:
            frozen.remove(node)
            del node.meta[NO_GRAD]
        elif node.target is operator.getitem and source in frozen and not _is_tensor(values, source):
            frozen.add(node)  # it only takes a tensor out of the source's result
    for node in [n for n in graph.nodes if n in frozen]:
        readers = [user for user in node.users if user not in frozen and has_tensors(values.get(user.name))]
        if readers and has_tensors(values.get(node.name)):
            before = set(graph.nodes)
            with graph.inserting_after(node):
                detached = _detached(graph, node, values)
            for made in set(graph.nodes) - before:
                made_beside(node, made)
            for user in readers:
                user.replace_input_with(node, detached)
                returned_instead(user, node, detached)
    graph.lint()


def without_gradients(graph: fx.Graph) -> list[fx.Node]:
    """The operations that run without gradients."""
    return [n for n in graph.nodes if NO_GRAD in n.meta and n.op not in ("placeholder", "get_attr", "output")]


def pin_before_detached(traced: fx.GraphModule) -> None:
    """Pin layers whose outputs are only read through ``detach()``: they get no gradient, either."""
    nodes = list(traced.graph.nodes)
    cuts = [node for node in nodes if _detaches(node)]
    if not cuts:
        return
    trained = _before([node for node in nodes if node.op == "output" or _writes(node, traced)])
    learning = {place for node in trained for place in _weights(node)}
    pin_layers(traced, [n for n in _before(cuts) - trained if learning.isdisjoint(_weights(n))])


def _weights(node: fx.Node) -> set[str]:
    """The paths of the weights that a node reads."""
    own = {str(node.target)} if node.op == "call_module" else set()
    return own | {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}


def _detaches(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("detach", "detach_")
    return node.target in (torch.detach, torch.detach_) or (
        node.target is getattr and node.args[1:] == ("data",)
    )


def _writes(node: fx.Node, traced: fx.GraphModule) -> bool:
    return node.target is operator.setitem or writes_in_place(node, traced)


def _before(ends: list[fx.Node]) -> set[fx.Node]:
    """The nodes that ``ends`` are computed from, back to detached ones."""
    nodes: set[fx.Node] = set()
    todo = [source for end in ends for source in end.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in nodes and not _detaches(node):
            nodes.add(node)
            todo += node.all_input_nodes
    return nodes


def pin_layers(module: nn.Module, nodes: Iterable[fx.Node]) -> None:
    """Mark the nodes without gradients that read weights: if they are layers, their channels stay."""
    for node in nodes:
        if node.op == "call_module":
            weights = list(module.get_submodule(str(node.target)).parameters())
        else:
            read = [n for n in map(_unmoved, node.all_input_nodes) if n.op == "get_attr"]
            weights = [w for n in read if isinstance(w := held(module, str(n.target)), nn.Parameter)]
        if any(weight.dim() > 1 for weight in weights):
            node.meta.setdefault(
                FROZEN, f"{node.target if node.op == 'call_module' else readable_name(node)!r} {_FROZEN}"
            )


def _unmoved(node: fx.Node) -> fx.Node:
    while has(operation_name(node, None), Trait.MOVES) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _operands(traced: fx.GraphModule, run: Callable[[Callable[..., Any]], Any]) -> dict[fx.Node, fx.Node]:
    finder = _Returned(traced)
    run(finder.run)
    return {n: operand for n, operand in finder.operand.items() if "drop" not in str(operation_of(traced, n))}


def _detached(graph: fx.Graph, node: fx.Node, values: dict[str, Any]) -> fx.Node:
    """The node's tensor, or its tuple or list of tensors, detached; added at the graph's insert point."""
    value = values[node.name]
    if isinstance(value, TensorInfo):
        made = graph.call_method("detach", (node,))
    elif isinstance(value, (tuple, list)):
        parts = []
        point = node
        for index, part in enumerate(value):
            with graph.inserting_after(point):
                item = point = graph.call_function(operator.getitem, (node, index))
            values[item.name] = part
            if has_tensors(part):
                with graph.inserting_after(item):
                    item = point = _detached(graph, item, values)
            parts.append(item)
        with graph.inserting_after(point):
            made = graph.call_function(type(value) if type(value) in (tuple, list) else tuple, (parts,))
    else:
        raise TraceError(
            f"{readable_name(node)} returns a {type(value).__name__} under torch.no_grad(): return tensors."
        )
    values[made.name] = value
    return made


def _is_tensor(values: dict[str, Any], node: Any) -> bool:
    return isinstance(values.get(node.name), TensorInfo)
