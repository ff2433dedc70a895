"""Graphs that hold both of a model's modes; each mode runs only its own part.

Beside the operations of both modes, the graph holds those of `train()` only and those of `eval()` only. Where they
meet, a node `by_mode(flag, evaluated, trained)` picks one; its flag reads the `training` of the module that decides.
Operations that only one mode needs run only in that mode: the generated code has a branch.

    graph   flag = get_attr[drop.training];  noise = bernoulli(...);  mul = x * noise;  out = by_mode(flag, x, mul)
    code    if flag:
                noise = bernoulli(...)
                mul = x * noise
            out = mul if flag else x

A call of the graph that leaves out optional arguments runs operations of its own, too: its flag is `left_out`.

Operations that run with autocast switched off are in a ``with`` block that does so.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen, PythonCode

from smcp_fx.errors import InputError
from smcp_fx.tracing.names import any_names, holds_unfit_names
from smcp_fx.tracing.sentences import TAKEN, listed_paths
from smcp_fx.tracing.values import NO_AUTOCAST

#: When a node runs: in any of these cases, each a set of (name of the flag's node, its value) that hold together.
Condition = frozenset[frozenset[tuple[str, bool]]]

ALWAYS: Condition = frozenset([frozenset()])
_NEVER: Condition = frozenset()
#: Nodes that run in more cases than this always run, and so do their operands. Chosen, not measured.
_CASES = 32
_COUNTER = re.compile(r"# COUNTER: (\d+)\n")
#: The devices whose autocast is switched off; the network may later be on any of them.
_DEVICES = ("cpu", "cuda")
_WITHOUT_AUTOCAST = f"with {', '.join(f'torch.autocast({kind!r}, enabled=False)' for kind in _DEVICES)}:\n"


def by_mode(training: bool, evaluated: Any, trained: Any) -> Any:
    """Return the mode's operand. Without users, the node tells in which mode its operand runs for its effect."""
    return trained if training else evaluated


def left_out(given: tuple[Any, ...], defaults: tuple[Any, ...]) -> bool:
    """Whether the arguments of a call are all at these defaults: None, a truth value or a string."""
    found = all(
        value is default or (type(value) is type(default) and value == default)
        for value, default in zip(given, defaults, strict=True)
    )
    exporting = found and torch.compiler.is_exporting()  # torch.compile cannot look at frames
    if exporting and sys._getframe(1).f_code.co_filename == fx.interpreter.__file__:
        raise InputError(
            "torch.export runs a graph's nodes one by one, also those of calls with arguments that this call leaves "
            "out. Export torch.nn.Sequential(model) instead, or what convert(prepared, into=model) returns"
        )
    return found


def form_key(names: Iterable[str]) -> str:
    """The key for leaving out these arguments, among flags named by their modules' paths."""
    return f"?{','.join(names)}"


def require_one_mode(graph: fx.Graph, paths: list[str]) -> None:
    """Make the graph refuse to run unless these modules are all in one mode."""
    names = listed_paths(paths)
    flags: list[fx.Node] = []
    for path in paths:
        target = f"{path}.training" if path else "training"
        flag = next((n for n in graph.nodes if n.op == "get_attr" and n.target == target), None)
        if flag is None:
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                flag = graph.create_node("get_attr", target)
        flags.append(flag)
    point = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    for flag in flags[1:]:
        with graph.inserting_before(point):
            same = graph.call_function(operator.eq, (flags[0], flag))
            graph.call_function(
                torch._assert,
                (same, f"{TAKEN}{names} are all in train mode or all in eval mode, since their forwards ask for the "
                       "modes of so many modules together"),
            )  # fmt: skip


def is_by_mode(node: fx.Node) -> bool:
    """Whether the node chooses between two modes."""
    return node.op == "call_function" and node.target is by_mode


def is_flag(node: fx.Node) -> bool:
    """Whether the node reads a module's mode, or which arguments a call leaves out."""
    return node.target is left_out or (
        node.op == "get_attr" and str(node.target).rpartition(".")[2] == "training"
    )


def owner_of_flag(flag: fx.Node) -> str:
    """The path of the module whose mode a flag reads, or the key of the arguments that are left out."""
    if flag.target is left_out:
        return form_key(str(argument.target) for argument in flag.all_input_nodes)
    return str(flag.target).rpartition(".")[0]


def conditions(nodes: Iterable[fx.Node]) -> dict[fx.Node, Condition]:
    """The condition under which each node runs: when its users need it; without users, or in both modes, always."""
    conditions_of: dict[fx.Node, Condition] = {}
    for node in reversed(list(nodes)):
        wanted = _NEVER if node.users else ALWAYS
        for user in node.users:
            if is_by_mode(user) and node is not user.args[0]:
                flag, evaluated, trained = user.args
                for side, operand in ((False, evaluated), (True, trained)):
                    if node in _nodes_in(operand):
                        case = frozenset([(str(flag), side)])
                        wanted |= {case | known for known in conditions_of[user]}
            else:
                wanted |= conditions_of[user]
        always = node.op in ("placeholder", "get_attr", "output") or node.target is left_out
        conditions_of[node] = ALWAYS if always else _simplified(wanted)
    return conditions_of


class Choice:
    """The nodes that one mode runs; ``modes``: values of flags by name; all other flags are ``training``.

    ``when``: the `conditions` of the nodes.
    """

    def __init__(
        self,
        when: Mapping[fx.Node, Condition],
        training: bool = False,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        self._when, self._training, self._modes = when, training, modes or {}

    def runs(self, node: fx.Node) -> bool:
        """Do these modes run this node?"""
        when = self._when[node]
        return when == ALWAYS or any(all(self._mode(flag) is side for flag, side in case) for case in when)

    def taken(self, node: fx.Node) -> Any:
        """The argument that these modes take at a node that chooses."""
        return node.args[1 + self._mode(str(node.args[0]))]

    def _mode(self, flag: str) -> bool:
        return self._modes.get(flag, self._training)


class ModeInterpreter(fx.Interpreter):
    """Runs the nodes of one mode: see `Choice`.

    The graph's modules keep their own modes, so that a batch of one image will do.
    """

    def __init__(
        self, module: fx.GraphModule, training: bool = False, modes: Mapping[str, bool] | None = None
    ) -> None:
        super().__init__(module)
        self.when = conditions(module.graph.nodes)
        chosen = dict(modes or {})
        self._asking = [n for n in module.graph.nodes if n.target is left_out and n.name not in chosen]
        self._modes = dict.fromkeys((n.name for n in self._asking), False) | chosen
        self._choice = Choice(self.when, training, self._modes)

    def runs(self, node: fx.Node) -> bool:
        """Do these modes, and the arguments of this call, run this node?"""
        self._modes.update((flag.name, self.env[flag]) for flag in self._asking if flag in self.env)
        return self._choice.runs(node)

    def run_node(self, n: fx.Node) -> Any:
        """The node's result; None if these modes do not run it."""
        if not self.runs(n):
            return None
        if is_by_mode(n):
            return fx.node.map_arg(self._choice.taken(n), self.env.__getitem__)
        with _autocast_of(n):
            return super().run_node(n)


def run_in_eval(graph: fx.Graph) -> set[str]:
    """The names of the nodes that run when every module is in eval mode: the network as it is deployed."""
    return {
        node.name
        for node, when in conditions(graph.nodes).items()
        if any(not any(training for _, training in case) for case in when)
    }


def evaluated_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph without the operations of training alone; the nodes keep their names."""
    present = run_in_eval(graph)
    copied = fx.Graph()
    placed: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.name not in present:
            continue
        if is_by_mode(node):
            placed[node] = fx.node.map_arg(node.args[1], lambda n: placed[n])
        else:
            placed[node] = copied.node_copy(node, lambda n: placed[n])
    return with_branches(copied)


def with_branches(graph: fx.Graph) -> fx.Graph:
    """Let the graph's code run nodes in their own mode and autocast only, and allow any names; returns the graph."""
    if any(is_by_mode(n) or NO_AUTOCAST in n.meta for n in graph.nodes) or holds_unfit_names(graph):
        graph.set_codegen(ModeCodeGen())
    return graph


def _autocast_of(node: fx.Node) -> AbstractContextManager[Any]:
    if NO_AUTOCAST not in node.meta:
        return nullcontext()
    stack = ExitStack()
    for kind in _DEVICES:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


class ModeCodeGen(CodeGen):
    """Writes nodes of one mode into a branch, nodes without autocast into a context, and unusual names as data."""

    def _gen_python_code(
        self, nodes: Any, root_module: str, namespace: Any, *args: Any, **kwargs: Any
    ) -> PythonCode:
        listed = list(nodes)
        self._body_transformer = partial(_branched, listed)
        try:
            with any_names():
                return super()._gen_python_code(nodes, root_module, namespace, *args, **kwargs)
        finally:
            self._body_transformer = None


def _branched(nodes: list[fx.Node], body: list[str]) -> list[str]:
    """The statements: consecutive nodes of one condition under one ``if``, without autocast under one ``with``."""
    parts = _COUNTER.split("".join(body))  # the code before the first node, then number and text of each node
    when = conditions(nodes)
    result, current, plainly = [parts[0]], ALWAYS, False
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        node = nodes[int(number)]
        result.append(f"# COUNTER: {number}\n")
        if is_by_mode(node):
            text = _choice(node, text)
        if not text.strip():
            continue
        if when[node] != current:
            current, plainly = when[node], False
            if current != ALWAYS:
                result.append(f"if {_written(current, nodes)}:\n")
        indent = "" if current == ALWAYS else "    "
        if not plainly and NO_AUTOCAST in node.meta:
            result.append(f"{indent}{_WITHOUT_AUTOCAST}")
        plainly = NO_AUTOCAST in node.meta
        indent += "    " if plainly else ""
        result += [f"{indent}{line}\n" if line else "\n" for line in text.removesuffix("\n").split("\n")]
    return result


def _choice(node: fx.Node, text: str) -> str:
    """`by_mode` written as an expression that looks at one operand only."""
    flag, evaluated, trained = node.args
    written = f"{node} = {trained!r} if {flag} else {evaluated!r}"
    return re.sub(rf"^{node}\b[^=]*= .*?(?=;  |$)", lambda _: written, text, count=1, flags=re.MULTILINE)


def _written(condition: Condition, nodes: list[fx.Node]) -> str:
    place = {node.name: index for index, node in enumerate(nodes)}
    cases = []
    for case in sorted(condition, key=lambda case: sorted((place[name], side) for name, side in case)):
        words = [
            name if side else f"not {name}" for name, side in sorted(case, key=lambda one: place[one[0]])
        ]
        cases.append(" and ".join(words))
    return " or ".join(cases)


def _nodes_in(tree: Any) -> set[fx.Node]:
    nodes: set[fx.Node] = set()
    fx.node.map_arg(tree, nodes.add)
    return nodes


def _simplified(condition: Condition) -> Condition:
    """Fewer cases with the same meaning: drop flags that do not matter, and cases contained in others."""
    cases = {case for case in condition if not any((name, not side) in case for name, side in case)}
    changed = True
    while changed:
        changed = False
        for case in list(cases):
            for name, side in case:
                rest = case - {(name, side)}
                if rest | {(name, not side)} in cases or any(other <= rest for other in cases - {case}):
                    cases.discard(case)
                    cases.add(rest)
                    changed = True
                    break
            if changed:
                break
        for case in list(cases):
            if any(other < case for other in cases):
                cases.discard(case)
                changed = True
    return frozenset(cases) if len(cases) <= _CASES else ALWAYS
