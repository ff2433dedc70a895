"""Modules as JSON and tensors: classes and attributes from the list of `smcp_fx.serialization.safe_modules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.serialization.call_rules import check_calls
from smcp_fx.serialization.graph_codec import find_function, saved_function_names, saved_name
from smcp_fx.serialization.parameter_shapes import check_shapes
from smcp_fx.serialization.safe_modules import attribute_names, check_attributes, class_name, find_class
from smcp_fx.serialization.saved_names import check_identifier, check_path
from smcp_fx.storage.tensor_file import TensorWriter
from smcp_fx.storage.value_codec import decode_value, encode_value

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: Fields of every module beside its own attributes; `torch.compile` leaves the last one.
MODULE_FIELDS = {*vars(nn.Module()), "_compiled_call_impl"}
#: Most modules, counted at every path that leads to them.
_MOST_MODULES = 100_000


def encode_modules(root: fx.GraphModule, read: set[str], tensors: TensorWriter) -> list[dict[str, Any]]:
    """Return every module in order, parents before children; a module at a second path refers to the first.

    Attributes are left out if neither the module's class defines them nor the graph reads them.
    """
    entries: list[dict[str, Any]] = []
    seen: dict[int, str] = {}

    def visit(module: nn.Module | None, path: str) -> None:
        where = f"module {path!r}" if path else "the model"
        if path:
            check_path(path, where)
        if module is None or id(module) in seen:
            entries.append({"path": path, "same_as": None if module is None else seen[id(module)]})
            return
        seen[id(module)] = path
        entries.append({"path": path, **_encode_module(module, path, where, read, tensors)})
        for name, child in module._modules.items():
            visit(child, f"{path}.{name}" if path else name)

    visit(root, "")
    return entries


def _encode_module(
    module: nn.Module, path: str, where: str, read: set[str], tensors: TensorWriter
) -> dict[str, Any]:
    kind = class_name(module, where) if path else "torch.nn.modules.module.Module"
    hooks = [name for name in HOOKS if getattr(module, name)]
    if hooks:
        raise CheckpointError(
            f"{where} ({type(module).__name__}) has hooks ({', '.join(hooks)}), which a file cannot hold; remove "
            "them before saving"
        )

    def tensor(name: str, value: Tensor | None) -> str | None:
        return None if value is None else tensors.add(f"{path}.{name}" if path else name, value, where)

    def special(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": tensor(attribute, value)}
        if callable(value) and not isinstance(value, type):
            return {"function": saved_name(value, f"{where}, attribute {attribute!r}")}
        return None

    wanted = attribute_names(kind)
    own = {name: value for name, value in vars(module).items() if name in wanted}
    check_attributes(kind, own, where)
    own |= {
        name: value
        for name, value in vars(module).items()
        if name not in MODULE_FIELDS and (f"{path}.{name}" if path else name) in read
    }
    attributes = {}
    for attribute, value in own.items():
        attributes[attribute] = encode_value(value, f"{where}, attribute {attribute!r}", special)
    persistent = {name for name in module._buffers if name not in module._non_persistent_buffers_set}
    return {
        "class": kind,
        "training": module.training,
        "attributes": attributes,
        "parameters": {name: tensor(name, value) for name, value in module._parameters.items()},
        "buffers": {
            name: [tensor(name, value), name in persistent] for name, value in module._buffers.items()
        },
    }


def decode_modules(entries: list[dict[str, Any]], read: set[str], tensors: Mapping[str, Tensor]) -> nn.Module:
    """Invert `encode_modules`; no constructor runs. `CheckpointError` names the module that does not fit."""
    modules: dict[str, nn.Module] = {}
    within: list[str] = []  # paths that may still get children
    sizes: dict[int, int] = {}

    def leave(path: str) -> None:
        module = modules[path]
        sizes[id(module)] = 1 + sum(
            1 if child is None else sizes[id(child)] for child in module._modules.values()
        )
        if sizes[id(module)] > _MOST_MODULES:
            raise CheckpointError(f"the model has more than {_MOST_MODULES} modules")

    for entry in entries:
        path = entry["path"]
        where = f"module {str(path)[:80]!a}"
        if path:
            check_path(path, where)
        parent, _, name = path.rpartition(".")
        while path and within and within[-1] != parent:
            leave(within.pop())
        if path in modules or bool(path) != bool(within):
            raise CheckpointError(f"{where} comes twice in the manifest, or not after its parent module")
        if "same_as" in entry:
            same = entry["same_as"]
            module = None if same is None else modules[same]
            if same in within:
                raise CheckpointError(f"{where} is a module that it lies in itself")
        else:
            module = _decode_module(entry, path, where, read, tensors)
            within.append(path)
        if module is not None:
            modules[path] = module
        if path:
            _check_name(name, where)
            if name in modules[parent]._modules:
                raise CheckpointError(f"{where} comes twice in the manifest")
            modules[parent]._modules[name] = module
    while within:
        leave(within.pop())
    return modules[""]


def _decode_module(
    entry: Mapping[str, Any], path: str, where: str, read: set[str], tensors: Mapping[str, Tensor]
) -> nn.Module:
    kind = find_class(entry["class"], where)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    if not isinstance(entry["training"], bool):
        raise CheckpointError(f"{where}: its mode is neither train() nor eval()")
    module.training = entry["training"]
    special = {"tensor": tensors.__getitem__, "function": lambda name: find_function(name, where)}
    wanted = attribute_names(entry["class"])
    for name, data in entry["attributes"].items():
        check_identifier(_check_name(name, where), where)
        if name not in wanted and ((f"{path}.{name}" if path else name) not in read or hasattr(kind, name)):
            raise CheckpointError(f"{where}: {name!r} is not an attribute of {kind.__name__}")
        vars(module)[name] = decode_value(data, f"{where}, attribute {name!r}", special)
    check_attributes(entry["class"], vars(module), where)
    for name, reference in entry["parameters"].items():
        parameter = None if reference is None else tensors[reference]
        if not (parameter is None or isinstance(parameter, nn.Parameter)):
            raise CheckpointError(f"{where}: {name!r} should be a parameter, but is a buffer in the manifest")
        module._parameters[_check_name(name, where)] = parameter
    for name, (reference, persistent) in entry["buffers"].items():
        buffer = None if reference is None else tensors[reference]
        module.register_buffer(_check_name(name, where), buffer, persistent=bool(persistent))
    check_shapes(module, where)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return module


def _check_name(name: Any, where: str) -> str:
    """Check a name in a module's own tables: a single path atom that hides no attribute of `nn.Module`."""
    if "." in check_path(name, where) or name in MODULE_FIELDS:
        raise CheckpointError(f"{where}: {name!r} is not a name that a saved model may use")
    return str(name)


def check_targets(root: nn.Module, graph: fx.Graph) -> None:
    """Check that every module called and every value read exists, and that calls are on the closed lists."""
    for node in graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        owner, _, name = str(node.target).rpartition(".")
        try:
            parent = root.get_submodule(owner)
        except AttributeError:
            parent = None
        value = None if parent is None else {**vars(parent), **_members(parent)}.get(name)
        expected = nn.Module if node.op == "call_module" else (Tensor, bool, int, float, str, tuple, list)
        if not isinstance(value, expected):
            wanted = "a module" if node.op == "call_module" else "a tensor or a plain value"
            raise CheckpointError(
                f"node {node.name!r} needs {wanted} {str(node.target)!r}; the model has "
                f"{'none' if value is None else type(value).__name__} there"
            )
    check_calls(graph, root, saved_function_names(graph))


def _members(module: nn.Module) -> dict[str, Any]:
    return {**module._buffers, **module._parameters, **module._modules}
