"""Hooks on blocks whose forward a graph holds.

A graph calls layers. It holds a block's operations, but never calls the block or its hooks. While a block has
hooks, its operations run as a call of the block:

    before   a = conv(x);  b = relu(a);  y = b + x               (all made in `layer1`)
    after    y = layer1(x)                                        (its forward: these operations)

The tracer notes each call (`note_call`) on the first node that it returned, and numbers the nodes that calls take and
return. Rewrites copy these notes to the nodes that replace others.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import Proxy
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from smcp_fx.tracing.copying import sharing
from smcp_fx.tracing.mode_reads import unmarked
from smcp_fx.tracing.modes import is_by_mode, with_branches
from smcp_fx.tracing.own_weights import forward_with_weight, has_hooks
from smcp_fx.tracing.recurrent import recurrent
from smcp_fx.tracing.trees import leaves_of

#: In a node's meta: the calls of modules that returned it, by their keys in ``nn_module_stack``.
_CALLS = "smcp_calls"
#: In a node's meta: its numbers, one from each trace that made it; traces share no numbers.
_NUMBERS = "smcp_numbers"
_COUNT = count()
_STACK = "nn_module_stack"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Numbered:
    """A placeholder for the node of this number."""

    number: int


@dataclass(frozen=True)
class _Tree:
    """Nested values, with `_Numbered` in the places of nodes."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def numbers(self) -> list[int]:
        return [leaf.number for leaf in self.leaves if isinstance(leaf, _Numbered)]

    def filled(self, values: Any) -> Any:
        """The nested values, with ``values`` in the places of the nodes, in order."""
        tensors = iter(values)
        return pytree.tree_unflatten(
            [next(tensors) if isinstance(leaf, _Numbered) else leaf for leaf in self.leaves], self.structure
        )

    def taken(self, tree: Any) -> list[Any]:
        """The inverse of `filled`."""
        return [
            value
            for leaf, value in zip(self.leaves, pytree.tree_leaves(tree), strict=True)
            if isinstance(leaf, _Numbered)
        ]


def note_call(key: str, arguments: Any, returned: Any) -> None:
    """Note a module call's arguments, as (args, kwargs), and its result on the first returned node."""
    nodes = [leaf.node for leaf in leaves_of(returned) if isinstance(leaf, Proxy)]
    trees = [_tree(value) for value in (arguments, returned)]
    if nodes and None not in trees:
        unmarked(nodes[0]).meta.setdefault(_CALLS, {})[key] = tuple(trees)


def _tree(value: Any) -> _Tree | None:
    leaves, structure = pytree.tree_flatten(value)
    if not all(isinstance(leaf, (Proxy, *_PLAIN)) for leaf in leaves):
        return None
    numbered = (_Numbered(_number(leaf)) if isinstance(leaf, Proxy) else leaf for leaf in leaves)
    return _Tree(tuple(numbered), structure)


def _number(value: Proxy) -> int:
    numbers: tuple[int, ...] = unmarked(value.node).meta.setdefault(_NUMBERS, (next(_COUNT),))
    return numbers[0]


def merge_notes(made: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Merge the notes of the traces' nodes into the node that was made from them."""
    others = [node for node in nodes if node is not made]
    for node in others:
        if _CALLS in node.meta:
            made.meta[_CALLS] = {**node.meta[_CALLS], **made.meta.get(_CALLS, {})}
    merge_numbers(made, others)


def merge_numbers(made: fx.Node, nodes: Iterable[fx.Node]) -> None:
    """Add the numbers of ``nodes`` to the node's own."""
    numbers = {number for node in (made, *nodes) for number in node.meta.get(_NUMBERS, ())}
    if numbers:
        made.meta[_NUMBERS] = tuple(numbers)


#: By graph module, as of its last call: the next hook's id, the code, and the replacement to run.
_SEEN: weakref.WeakKeyDictionary[nn.Module, tuple[int, str, fx.GraphModule | None]] = (
    weakref.WeakKeyDictionary()
)


def with_hooks(module: fx.GraphModule, root: str = "") -> fx.GraphModule | None:
    """A replacement for the module's call that runs the hooks on its blocks; None if no block has hooks.

    ``root``: the path of the module whose forward the graph holds, if it is only a part of the graph module.
    Warns of hooks that cannot be called. Costs one look-up if no hook was registered since the last call.
    """
    seen, now = _SEEN.get(module), RemovableHandle.next_id
    if seen is None or seen[0] != now or seen[1] is not module._code:
        blocks = _hooked(module, f"{root}." if root else "")
        seen = _SEEN[module] = now, module._code, _rewired(module, blocks) if blocks else None
    if seen[2] is not None:
        seen[2].training = module.training
    return seen[2]


def call(module: fx.GraphModule, run: Callable[..., Any], args: Any, kwargs: Any, root: str = "") -> Any:
    """Call the graph module by ``run(*args, **kwargs)``, and the hooks on its blocks with it."""
    instead = with_hooks(module, root)
    if instead is None:
        return run(*args, **kwargs)
    vars(module)["forward"] = instead.forward
    try:
        return run(*args, **kwargs)
    finally:
        vars(module).pop("forward", None)


class CalledWithHooks(nn.Module):
    """A graph module whose calls run the hooks of blocks that the graph holds."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; warn of hooks that cannot run, such as hooks on blocks under torch.compile or export."""
        if torch.compiler.is_compiling():
            self._tell_of_hooks()
            return super().__call__(*args, **kwargs)
        assert isinstance(self, fx.GraphModule)
        return call(self, super().__call__, args, kwargs)

    def _tell_of_hooks(self) -> bool:
        assert isinstance(self, fx.GraphModule)
        if blocks := _hooked(self, ""):
            _warn_of(list(blocks), "torch.compile and torch.export take the graph without these blocks", 4)
        return bool(blocks)

    # As torch.compiler.assume_constant_result does, which would load torch's compiler at import.
    _tell_of_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _hooked(module: fx.GraphModule, root: str) -> dict[str, nn.Module]:
    """The modules with hooks that the graph does not call."""
    if not any(has_hooks(part) for part in module.modules() if part is not module):
        return {}
    called = {
        str(node.target)
        for node in module.graph.nodes
        if node.op == "call_module"
        or (node.op == "get_attr" and any(u.target in (forward_with_weight, recurrent) for u in node.users))
    }
    inside = tuple(f"{path}." for path in called)
    return {
        path: part
        for path, part in module.named_modules()
        if path.startswith(root) and path and has_hooks(part)
        if path not in called and not path.startswith(inside)
    }


def _rewired(owner: fx.GraphModule, blocks: dict[str, nn.Module]) -> fx.GraphModule:
    rewiring = _Rewiring(owner, blocks)
    made = rewiring.of(owner.graph)
    if lost := [path for path in blocks if path not in rewiring.called or path in rewiring.broken]:
        _warn_of(lost, "the graph does not hold these as blocks of their own", 7)
    return made


def _warn_of(paths: list[str], why: str, stacklevel: int) -> None:
    warnings.warn(
        f"hooks on {', '.join(map(repr, paths[:4]))}{' and more' * (len(paths) > 4)} are not called: {why}. Use "
        "convert(prepared, into=model), whose modules run as the original's, or a hook on a layer inside.",
        stacklevel=stacklevel,
    )


class _Rewiring:
    """Makes graphs that call ``blocks``, by path, for the graph module ``owner``."""

    def __init__(self, owner: fx.GraphModule, blocks: dict[str, nn.Module]) -> None:
        self.owner, self.blocks = owner, blocks
        self.called: set[str] = set()
        self.broken: set[str] = set()

    def of(self, graph: fx.Graph, done: frozenset[str] = frozenset()) -> fx.GraphModule:
        """A copy of the graph as a module; ``done``: calls to skip."""
        copied = fx.Graph()
        result = copied.graph_copy(graph, {})
        if result is not None:
            copied.output(result)
        calls: dict[str, _BlockCall] = {}
        while (outermost := self._outermost(copied, done)) is not None:
            key, path = outermost
            done |= {key}
            cut = _Cut.of(copied, key, path)
            if cut is None:
                self.broken.add(path)
                continue
            self.called.add(path)
            name = f"smcp_call_{len(calls)}"
            calls[name] = _BlockCall(self.blocks[path], self.owner, self.of(cut.part, done), *cut.trees)
            cut.replace(copied, name)
        module = sharing(self.owner, with_branches(copied))
        vars(module).update(calls)
        return module

    def _outermost(self, graph: fx.Graph, done: frozenset[str]) -> tuple[str, str] | None:
        """The first call of a block with hooks, by its key and path."""
        for node in graph.nodes:
            for key, (path, _) in (node.meta.get(_STACK) or {}).items() if node.op.startswith("call") else ():
                if key not in done and path in self.blocks:
                    return key, path
        return None


class _BlockCall:
    """Calls a block whose forward is a part of the graph, with its arguments and the part's other inputs."""

    def __init__(
        self, block: nn.Module, owner: nn.Module, part: fx.GraphModule, arguments: _Tree, returned: _Tree
    ) -> None:
        self.block, self.owner, self.part = block, owner, part
        self.arguments, self.returned = arguments, returned

    def __call__(self, *values: Any) -> Any:
        """Return the tensors that the block returned, one by one; a single one as it is."""
        count = len(self.arguments.numbers)
        self.part.training = self.owner.training

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.returned.filled(self.part(*self.arguments.taken((args, kwargs)), *values[count:]))

        args, kwargs = self.arguments.filled(values[:count])
        before = vars(self.block).get("forward")
        vars(self.block)["forward"] = forward
        try:
            outputs = self.returned.taken(self.block(*args, **kwargs))
        finally:
            vars(self.block).pop("forward")
            if before is not None:
                vars(self.block)["forward"] = before
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def call_block(block: _BlockCall, *values: Any) -> Any:
    """The function that a graph calls to run a block."""
    return block(*values)


def _noted(graph: fx.Graph, key: str) -> tuple[_Tree, _Tree] | None:
    return next((n.meta[_CALLS][key] for n in graph.nodes if key in n.meta.get(_CALLS, {})), None)


@dataclass(frozen=True)
class _Cut:
    """A block's part of a graph: its inputs, outputs and subgraph."""

    inside: list[fx.Node]
    reads: list[fx.Node]
    gives: list[fx.Node]
    part: fx.Graph
    trees: tuple[_Tree, _Tree]

    @staticmethod
    def of(graph: fx.Graph, key: str, path: str) -> _Cut | None:
        """None if the block's operations cannot be separated: other nodes read tensors inside."""
        trees = _noted(graph, key)
        nodes = {i: n for n in graph.nodes if not is_by_mode(n) for i in n.meta.get(_NUMBERS, ())}
        if trees is None or not {*trees[0].numbers, *trees[1].numbers} <= nodes.keys():
            return None
        inputs = [nodes[number] for number in trees[0].numbers]
        inside = _inside(graph, key, path, set(inputs))
        inputs = [_chosen(node, set(graph.nodes) - inside) for node in inputs]
        gives = [_chosen(nodes[number], inside) for number in trees[1].numbers]
        outside = {n for n in inside if any(user not in inside for user in n.users)}
        if not outside or not outside <= set(gives) or not set(gives) <= {*inside, *inputs}:
            return None
        others = (n for node in graph.nodes if node in inside for n in node.all_input_nodes)
        captured = dict.fromkeys(
            n for n in others if n not in inside and n not in inputs and n.op != "get_attr"
        )
        reads = [*inputs, *captured]
        ordered = [node for node in graph.nodes if node in inside]
        position = {node: index for index, node in enumerate(graph.nodes)}
        point = min(position[user] for node in outside for user in node.users if user not in inside)
        if any(position[node] > point for node in reads):
            return None
        part = fx.Graph()
        placed: dict[fx.Node, fx.Node] = {}
        for place, node in enumerate(reads):
            start = part.placeholder(f"{node.name}_{place}" if node in placed else node.name)
            if placed.setdefault(node, start) is start and _NUMBERS in node.meta:
                start.meta[_NUMBERS] = node.meta[_NUMBERS]
        held = {source for node in ordered for source in node.all_input_nodes if source.op == "get_attr"}
        for node in (*sorted(held, key=position.__getitem__), *ordered):
            placed[node] = part.node_copy(node, lambda n: placed[n])
        part.output(tuple(placed[node] for node in gives))
        return _Cut(ordered, reads, gives, part, trees)

    def replace(self, graph: fx.Graph, name: str) -> None:
        """Let the graph call the attribute ``name`` instead of running the block's operations."""
        inside = set(self.inside)
        position = {node: index for index, node in enumerate(graph.nodes)}
        users = (user for node in self.inside for user in node.users if user not in inside)
        with graph.inserting_before(min(users, key=position.__getitem__)):
            block = graph.create_node("get_attr", name)
            result = graph.call_function(call_block, (block, *self.reads))
            single = len(self.gives) == 1
            parts = (
                [result]
                if single
                else [graph.call_method("__getitem__", (result, i)) for i in range(len(self.gives))]
            )
        for node, part in zip(self.gives, parts, strict=True):
            for user in [user for user in node.users if user not in inside and node in inside]:
                user.replace_input_with(node, part)
        for node, part, number in zip(self.gives, parts, self.trees[1].numbers, strict=True):
            if node in inside:  # the next block knows it by its numbers
                part.meta[_NUMBERS] = (number, *(() if is_by_mode(node) else node.meta.get(_NUMBERS, ())))
        for node in reversed(self.inside):
            graph.erase_node(node)


def _inside(graph: fx.Graph, key: str, path: str, inputs: set[fx.Node]) -> set[fx.Node]:
    """The nodes of a call, and the nodes that passes added for them only."""
    inside = {n for n in graph.nodes if n.op.startswith("call") and key in (n.meta.get(_STACK) or {})}
    inside -= inputs
    own = f"{path}."
    for node in graph.nodes:
        if is_by_mode(node):  # it is placed at its reader, but belongs to the module it asks
            owner = str(node.args[0].target).removesuffix("training")
            mine = owner.startswith(own) and (node in inside or bool(inside & {*node.all_input_nodes}))
            (inside.add if mine else inside.discard)(node)
    for node in reversed(graph.nodes):
        added = node.op.startswith("call") and _STACK not in node.meta and node not in inputs
        if added and node.users and all(user in inside for user in node.users):
            inside.add(node)
    return inside


def _chosen(node: fx.Node, among: set[fx.Node]) -> fx.Node:
    """The node for any mode, given the node for eval mode."""
    choices: Iterator[fx.Node] = (u for u in node.users if u in among and is_by_mode(u) and u.args[1] is node)
    following = next(choices, None)
    return node if following is None else _chosen(following, among)
