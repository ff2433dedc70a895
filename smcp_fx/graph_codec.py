"""Graphs as JSON, and the closed list of functions and classes that may stand in them.

Nothing is evaluated and nothing is imported by a name that a file made up: functions are looked up in tables
of what `torch.fx` can record, module classes in the packages of `_CLASS_PACKAGES`. Because a `GraphModule`
generates Python code from its graph, every name that ends up in that code must be an identifier.
"""

from __future__ import annotations

import importlib
import keyword
import math
import operator
import re
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.value_codec import Special, decode_value, encode_value

#: Where module classes may come from: the leaves of `torch.fx.Tracer`, and what stands in for them.
_CLASS_PACKAGES = re.compile(
    r"(torch\.nn\.modules|torchvision\.(ops|models)|timm\.(layers|models))(\.[a-z_]\w*)*"
)
#: Packages whose functions may be called where the package itself declares them leaves of tracing.
_LEAF_PACKAGES = re.compile(r"(torchvision\.(ops|models)|timm\.(layers|models))(\.[a-z_]\w*)*")
_TORCH_NAMESPACES = (torch, torch.nn.functional, torch.linalg, torch.fft, torch.special)
#: Recorded by fx, but not listed by `torch.overrides`.
_TORCH_EXTRA = {
    torch: (
        "_assert",
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randn",
        "tensor",
        "zeros",
    ),
    torch.nn.functional: ("hardsigmoid", "hardswish", "sigmoid", "tanh", "upsample"),
}
#: Call what they are given, or hand out raw memory (which has a method that maps files).
_FORBIDDEN_FUNCTIONS = {"torch.nn.functional.triplet_margin_with_distance_loss", "operator.call"}
_FORBIDDEN_METHODS = {
    "apply_",
    "map2_",
    "map_",
    "module_load",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "storage",
    "untyped_storage",
}
_CONTAINER_METHODS = {"count", "get", "index", "items", "keys", "numel", "values"}
_PATH_ATOM = re.compile(r"[\w +:/-]+")
_OPERATIONS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")

# ---- names --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _functions() -> dict[str, Callable[..., Any]]:
    """Every function of torch, operator, math and builtins that a graph may call, by name."""
    # by equality: `torch.add` and the bound method that fx records are two objects that compare equal
    overridable = {f for functions in torch.overrides.get_overridable_functions().values() for f in functions}
    found: dict[str, Callable[..., Any]] = {"builtins.getattr": getattr}
    for space in _TORCH_NAMESPACES:
        extra = _TORCH_EXTRA.get(space, ())
        for name, value in vars(space).items():
            if not callable(value) or isinstance(value, type):
                continue
            in_place = name.endswith("_") and not name.startswith("_")
            if in_place or name in extra or value in overridable:
                found[f"{space.__name__}.{name}"] = value
    for library in (math, operator):
        for name, value in vars(library).items():
            if isinstance(value, types.BuiltinFunctionType) and not name.startswith("_"):
                found[f"{library.__name__}.{name}"] = value
    for name in _FORBIDDEN_FUNCTIONS:
        found.pop(name, None)
    return found


@lru_cache(maxsize=1)
def _function_names() -> dict[Callable[..., Any], str]:
    return {function: name for name, function in reversed(list(_functions().items()))}


def _import(name: str, where: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise CheckpointError(
            f"{where}: {name} cannot be imported ({error}). The model calls into {package}: install it, in the "
            "version that the manifest names under 'libraries'."
        ) from error


def _is_leaf_function(function: Any, module: types.ModuleType) -> bool:
    """Has the library itself registered the function as one that tracing must not enter?"""
    wrapped = fx._symbolic_trace._wrapped_fns_to_patch
    if (id(vars(module)), function.__name__) in wrapped:
        return True
    if module.__name__.startswith("timm."):
        registered = getattr(importlib.import_module("timm.layers"), "get_notrace_functions", list)
        return any(function is other for other in registered())
    return False


def function_name(function: Any, where: str) -> str:
    """Return the name a function is saved under; `CheckpointError` for one outside the allowed packages."""
    name = _function_names().get(function)
    if name is None:
        name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', function)}"
        try:
            same = find_function(name, where) is function
        except CheckpointError:
            same = False
        if not same:
            raise CheckpointError(
                f"{where}: the function {name} cannot be saved by name. Allowed are the tensor functions of "
                "torch, operator, math, getattr, and leaf functions of torchvision and timm. Write the model "
                "with these, or let torch.fx trace into the function (without torch.fx.wrap)."
            )
    return name


def find_function(name: Any, where: str) -> Callable[..., Any]:
    """Return the function of a saved name; `CheckpointError` for everything that is not on the list."""
    found = _functions().get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    module, _, attribute = str(name).rpartition(".")
    if _LEAF_PACKAGES.fullmatch(module):
        space = _import(module, where)
        candidate = vars(space).get(attribute)
        if isinstance(candidate, types.FunctionType) and _is_leaf_function(candidate, space):
            return candidate
        if isinstance(candidate, type) and issubclass(candidate, tuple) and hasattr(candidate, "_fields"):
            return candidate  # a named tuple of outputs
    raise CheckpointError(
        f"{where}: the function {name!r} is not one that a saved model may call. The manifest was made by "
        "another version of a library, or was tampered with: save the model again with the versions here."
    )


def class_name(module: nn.Module, where: str) -> str:
    """Return the name a module's class is saved under; `CheckpointError` for one outside the allowed packages."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        same = find_class(name, where) is kind
    except CheckpointError:
        same = False
    if not same:
        raise CheckpointError(
            f"{where}: the class {name} cannot be saved by name. Allowed are module classes of torch.nn, "
            "torchvision and timm. Other modules are traced into, unless hooks or parametrisations keep them "
            "whole: take these off before smcp_fx.prepare (torch.nn.utils.parametrize.remove_parametrizations)."
        )
    return name


def find_class(name: Any, where: str) -> type[nn.Module]:
    """Return the module class of a saved name; `CheckpointError` for everything that is not on the list."""
    module, _, attribute = str(name).rpartition(".")
    if isinstance(name, str) and _CLASS_PACKAGES.fullmatch(module):
        found = vars(_import(module, where)).get(attribute)
        if isinstance(found, type) and issubclass(found, nn.Module) and found.__module__ == module:
            return found
    raise CheckpointError(
        f"{where}: the class {name!r} is not a module class that a saved model may hold. The manifest was made "
        "by another version of a library, or was tampered with: save the model again with the versions here."
    )


def check_identifier(name: Any, where: str) -> str:
    """Return a name that may stand in generated code; `CheckpointError` for any other."""
    if isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and name[:2] != "__":
        return name
    raise CheckpointError(f"{where}: {name!r} is not a name that a saved model may hold; use an identifier")


def check_path(path: Any, where: str) -> str:
    """Return a dotted module path whose parts may stand in generated code; `CheckpointError` for any other."""
    if isinstance(path, str) and all(
        _PATH_ATOM.fullmatch(atom) and not atom.startswith("__") for atom in path.split(".")
    ):
        return path
    raise CheckpointError(
        f"{where}: {path!r} is not a path that a saved model may hold; name modules with letters, digits, '_'"
    )


# ---- graphs -------------------------------------------------------------------------------------------------


def encode_graph(graph: fx.Graph) -> list[dict[str, Any]]:
    """Return a graph as a list of nodes: name, op, target, args, kwargs. `CheckpointError` names the node."""
    if type(graph._codegen) is not fx.graph.CodeGen:
        raise CheckpointError(
            f"the graph generates its code with {type(graph._codegen).__name__}, which cannot be saved; trace the "
            "model with smcp_fx.prepare, which takes its inputs as they are"
        )
    return [_encode_node(node) for node in graph.nodes]


def _encode_node(node: fx.Node) -> dict[str, Any]:
    where = describe(node)

    def special(value: Any) -> Any:
        return {"node": value.name} if isinstance(value, fx.Node) else None

    target = node.target
    saved = function_name(target, where) if node.op == "call_function" else str(target)
    data = {
        "name": node.name,
        "op": node.op,
        "target": saved,
        "args": [encode_value(value, where, special) for value in node.args],
        "kwargs": {key: encode_value(value, where, special) for key, value in node.kwargs.items()},
    }
    check_identifier(node.name, where)
    for key in node.kwargs:
        check_identifier(key, where)
    _check_node(node.op, saved, node.args, where)
    return data


def describe(node: fx.Node) -> str:
    """Name a node, and the module whose forward made it where that is known."""
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return f"node {node.name!r} (in module {path!r})" if path else f"node {node.name!r}"


def _check_node(op: str, target: str, args: tuple[Any, ...], where: str) -> None:
    """What holds of every node that is written or read; the last line of defence against made-up manifests."""
    if op == "placeholder":
        check_identifier(target.lstrip("*"), where)
        if target.startswith("***"):
            raise CheckpointError(f"{where}: {target!r} is not an argument")
    elif op in ("get_attr", "call_module"):
        check_path(target, where)
    elif op == "call_method":
        check_identifier(target, where)
        of_tensor = callable(getattr(torch.Tensor, target, None)) and not target.startswith("_")
        if not (of_tensor or target in _CONTAINER_METHODS) or target in _FORBIDDEN_METHODS:
            raise CheckpointError(f"{where}: the method {target!r} is not one that a saved model may call")
    elif target == "builtins.getattr":
        name = args[1] if len(args) in (2, 3) else None
        check_identifier(name, where)
        if str(name).startswith("_") or name in _FORBIDDEN_METHODS:
            raise CheckpointError(f"{where}: the attribute {name!r} is not one that a saved model may read")


def decode_graph(nodes: list[dict[str, Any]], device: torch.device) -> fx.Graph:
    """Inverse of `encode_graph`; device constants become ``device``."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    special: dict[str, Special] = {
        "node": lambda name: known[name],
        "device": lambda name: torch.device(name) if name == "meta" else device,
    }
    for data in nodes:
        name, op, target = data["name"], data["op"], data["target"]
        where = f"node {name!r}"
        if op not in _OPERATIONS or not isinstance(target, str) or name in known:
            raise CheckpointError(
                f"{where}: operation {op!r} of {target!r} is not one of a graph, or comes twice"
            )
        check_identifier(name, where)
        args = tuple(decode_value(value, where, special) for value in data["args"])
        kwargs = {
            check_identifier(key, where): decode_value(value, where, special)
            for key, value in data["kwargs"].items()
        }
        _check_node(op, target, args, where)
        called = find_function(target, where) if op == "call_function" else target
        known[name] = graph.create_node(op, called, args, kwargs, name=name)
        if op == "call_function" and target not in _functions():
            known[name].meta["is_wrapped"] = True  # a leaf when the loaded model is traced again, too
    if [data["op"] for data in nodes].count("output") != 1 or nodes[-1]["op"] != "output":
        raise CheckpointError(
            "the graph has no output, or several; the manifest is damaged: save the model again"
        )
    return graph
