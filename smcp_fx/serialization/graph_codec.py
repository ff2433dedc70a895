"""Graphs as JSON. Functions are looked up in closed lists; no name from a file is evaluated or imported.

A `GraphModule` generates Python code from its graph, so every name that ends up in that code is checked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverloadPacket

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.serialization.call_rules import place_of
from smcp_fx.serialization.safe_operations import LEAF_FUNCTIONS, function_names, functions
from smcp_fx.serialization.saved_names import check_argument, check_identifier, check_path
from smcp_fx.storage.value_codec import Special, decode_value, encode_value
from smcp_fx.tracing.autograd_functions import Applied, applied
from smcp_fx.tracing.modes import ModeCodeGen, by_mode, is_flag, with_branches
from smcp_fx.tracing.values import NO_AUTOCAST

_OPERATIONS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
_MOST_NODES = 200_000
_OWN = "own."
_OPERATORS = "torch.ops."
_ALWAYS_LEAVES = (Applied, OpOverloadPacket)
#: The user's own autograd functions, by saved name.
Own = Mapping[str, Applied]


def own_functions(classes: Iterable[Any]) -> Own:
    """Return the appliers of these autograd functions, by saved name.

    `InputError` for anything that is no such class, and for two classes of one name.
    """
    own: dict[str, Applied] = {}
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
            raise InputError(
                f"functions= takes classes derived from torch.autograd.Function, not {cls!r:.80}"
            )
        other = own.setdefault(_OWN + cls.__qualname__, applied(cls))
        if other.cls is not cls:
            raise InputError(
                f"two autograd functions are called {cls.__qualname__}; rename one of the classes"
            )
    return own


def saved_name(function: Any, where: str) -> str:
    """Return the name under which a function is saved; `CheckpointError` if it is not on the list."""
    if isinstance(function, Applied):
        return f"{_OWN}{function.cls.__qualname__}"
    try:
        name = function_names().get(function)
    except TypeError:  # not hashable
        name = None
    if name is not None:
        return name
    module = str(getattr(function, "__module__", None))
    attribute = str(getattr(function, "__qualname__", function))
    if isinstance(function, OpOverloadPacket):  # its qualified name is that of the C++ binding
        module, attribute = module.replace("torch._ops.", "torch.ops."), function.__name__
    if attribute in LEAF_FUNCTIONS.get(module, "").split():
        return f"{module}.{attribute}"
    raise CheckpointError(
        f"{where}: the function {module}.{attribute} cannot be saved by name. Allowed are the tensor functions of "
        "torch, operator, math, and leaf functions of torchvision and timm. Write the model with these, or let "
        "torch.fx trace into the function (without torch.fx.wrap)."
    )


def find_function(name: Any, where: str, own: Own | None = None) -> Callable[..., Any]:
    """Return the function of a saved name; `CheckpointError` if it is neither on the list nor in ``own``."""
    function = (own or {}).get(name) or functions().get(name) if isinstance(name, str) else None
    if function is not None:
        return function
    module, _, attribute = str(name).rpartition(".")
    if str(name).startswith(_OWN):
        raise CheckpointError(
            f"{where}: it applies {str(name)[len(_OWN) : 120]!a}, an autograd function of the model's own, which is "
            "not in the file. Pass the class: smcp_fx.load(file, functions=[...])."
        )
    if attribute and attribute in LEAF_FUNCTIONS.get(module, "").split():
        try:
            return getattr(_imported(module), attribute)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            package = module.removeprefix(_OPERATORS).partition(".")[0]
            raise CheckpointError(
                f"{where}: {name} cannot be imported ({error}). The model calls into {package}: install it, in the "
                "version that the manifest names under 'libraries'."
            ) from error
    raise CheckpointError(
        f"{where}: the function {str(name)[:120]!a} is not one that a saved model may call. The manifest was made by "
        "another version of a library, or was tampered with: save the model again with the versions here."
    )


def _imported(module: str) -> Any:
    """Return a leaf function's module, or the operator namespace that importing a library fills."""
    if not module.startswith(_OPERATORS):
        return importlib.import_module(module)
    library = module.removeprefix(_OPERATORS)
    importlib.import_module(library)
    return getattr(torch.ops, library)


def encode_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return a graph as a list of nodes: name, op, target, args, kwargs, and ``"autocast": false`` if off.

    `CheckpointError` names the node that cannot be saved.
    """
    if not _generates_its_code(graph):
        raise CheckpointError(
            f"the graph generates its code with {type(graph._codegen).__name__}, which cannot be saved; trace the "
            "model with smcp_fx.prepare, which takes its inputs as they are"
        )
    return [_encode_node(node) for node in graph.nodes]


def _generates_its_code(graph: fx.Graph) -> bool:
    """Whether the code can be generated from the nodes alone."""
    return type(graph._codegen) in (fx.graph.CodeGen, ModeCodeGen)


def _encode_node(node: fx.Node) -> dict[str, Any]:
    where = place_of(node)

    def special(value: Any) -> Any:
        return {"node": value.name} if isinstance(value, fx.Node) else None

    target = node.target
    saved = saved_name(target, where) if node.op == "call_function" else str(target)
    data: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "target": saved,
        "args": [encode_value(value, where, special) for value in node.args],
        "kwargs": {key: encode_value(value, where, special) for key, value in node.kwargs.items()},
    }
    if NO_AUTOCAST in node.meta:
        data["autocast"] = False
    check_identifier(node.name, where)
    for key in node.kwargs:
        check_identifier(key, where)
    _check_target(node.op, saved, where)
    return data


def _check_target(op: str, target: str, where: str) -> None:
    """Check a node's target, on writing and on reading. (`call_rules` checks the values it is called on.)"""
    if op == "placeholder":
        check_argument(target.removeprefix("*").removeprefix("*"), where)
    elif op in ("get_attr", "call_module"):
        check_path(target, where)
    elif op == "call_method":
        check_identifier(target, where)


def decode_graph(nodes: list[dict[str, Any]], device: torch.device, own: Own | None = None) -> fx.Graph:
    """Invert `encode_graph`; device constants become ``device``; ``own`` holds the user's own functions."""
    if not isinstance(nodes, list) or not 0 < len(nodes) <= _MOST_NODES:
        raise CheckpointError(f"the graph has no nodes, or more than {_MOST_NODES}: save the model again")
    graph = fx.Graph()
    by_name: dict[str, fx.Node] = {}
    special: dict[str, Special] = {
        "node": lambda name: by_name[name],
        "device": lambda name: torch.device("meta") if name == "meta" else device,
    }
    for data in nodes:
        name, op, target = data["name"], data["op"], data["target"]
        where = f"node {str(name)[:80]!a}"
        check_identifier(name, where)
        if op not in _OPERATIONS or not isinstance(target, str) or name in by_name:
            raise CheckpointError(
                f"{where}: operation {str(op)[:80]!a} of {target[:80]!a} is not one of a graph, or comes twice"
            )
        _check_target(op, target, where)
        if not isinstance(data["args"], list) or (op in ("get_attr", "placeholder") and data["kwargs"]):
            raise CheckpointError(f"{where}: its arguments are not those of a {op}")
        args = tuple(decode_value(value, where, special) for value in data["args"])
        kwargs = {
            check_identifier(key, where): decode_value(value, where, special)
            for key, value in data["kwargs"].items()
        }
        called = find_function(target, where, own) if op == "call_function" else target
        node = graph.create_node(op, called, args, kwargs, name=name)
        if node.name != name:
            raise CheckpointError(f"{where}: the name stands for something else in generated code")
        if called is by_mode and not _is_choice(node):
            raise CheckpointError(
                f"{where}: it does not choose between two values by a module's mode, or by what a call leaves out"
            )
        if op == "call_function" and target not in functions() and not isinstance(called, _ALWAYS_LEAVES):
            node.meta["is_wrapped"] = True  # it stays a leaf if the loaded model is traced again
        if data.get("autocast", True) is not True:
            if data["autocast"] is not False:
                raise CheckpointError(f"{where}: autocast is either left as it is around the model, or off")
            node.meta[NO_AUTOCAST] = True
        by_name[name] = node
    if [data["op"] for data in nodes].count("output") != 1 or nodes[-1]["op"] != "output":
        raise CheckpointError(
            "the graph has no output, or several; the manifest is damaged: save the model again"
        )
    return with_branches(graph)


def _is_choice(node: fx.Node) -> bool:
    """Whether a node is `by_mode(flag, evaluated, trained)`, whose generated code names the flag."""
    flag = node.args[0] if len(node.args) == 3 and not node.kwargs else None
    return isinstance(flag, fx.Node) and is_flag(flag)


def saved_function_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the saved name of each node's function; `CheckpointError` for a function without one."""
    return {
        node: saved_name(node.target, place_of(node)) for node in graph.nodes if node.op == "call_function"
    }


def read_values(graph: fx.Graph) -> set[str]:
    """Return the paths that the graph reads from its modules: tensors, flags, numbers."""
    return {str(node.target) for node in graph.nodes if node.op == "get_attr"}
