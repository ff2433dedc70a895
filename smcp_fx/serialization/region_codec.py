"""Models traced in parts as data: the regions' graphs, the layers outside them, other tensors by name.

The file lacks the Python between the regions: it is the user's, and comes with the model to be filled.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import CheckpointError
from smcp_fx.regions import Form, Region, RegionForward
from smcp_fx.serialization.converted import ConvertedModule
from smcp_fx.serialization.graph_codec import Own
from smcp_fx.serialization.graph_module_codec import decode_graph_module, encode_graph_module
from smcp_fx.serialization.module_codec import HOOKS, MODULE_FIELDS, decode_modules, encode_modules
from smcp_fx.serialization.safe_modules import specifications
from smcp_fx.storage.tensor_file import TensorWriter
from smcp_fx.storage.value_codec import Special, decode_value, encode_value
from smcp_fx.tracing.values import held

_CONTAINERS = (tuple, list, dict, OrderedDict)
_LAYER = "layer"


def encode_regions(model: nn.Module, tensors: TensorWriter) -> dict[str, Any]:
    """Return the manifest entries of a converted model whose regions run as graphs.

    ``regions``: their graphs and call forms; ``layers``: modules of `torch.nn` outside of them; ``rest``: the
    names of all other tensors; ``training``: modules in train mode. `CheckpointError` names the part that
    cannot be saved.
    """
    regions, layers, rest = [], [], {}
    within: list[str] = []
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, RegionForward):
            within.append(path)
            regions.append(_encode_region(path, forward, tensors))
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_layer(module) and not any(_is_in(path, region) for region in within):
            holder = fx.GraphModule(nn.Module(), fx.Graph())
            holder.add_module(_LAYER, module)
            layers.append({"path": path, "modules": encode_modules(holder, set(), tensors)})
    saved_names = {entry["name"] for entry in tensors.entries}
    for name, tensor in _tensors(model):
        saved = tensors.add(name, tensor, f"{name!r}")
        if saved not in saved_names:
            rest[name] = saved
    return {
        "regions": regions,
        "layers": layers,
        "rest": rest,
        "training": [path for path, module in model.named_modules() if module.training],
    }


def _encode_region(path: str, forward: RegionForward, tensors: TensorWriter) -> dict[str, Any]:
    where = f"region {path!r}"
    module = fx.GraphModule(forward.module, forward.module.graph)  # only the modules that the graph reads
    try:
        return {
            "path": path,
            "arguments": _encode_structure(forward.form.structure, f"{where}, its arguments"),
            "constants": encode_value(
                list(forward.form.constants), f"{where}, its arguments", lambda _: None
            ),
            "output": forward.output and _encode_structure(forward.output, f"{where}, its output"),
            **encode_graph_module(module, tensors),
        }
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}".replace(f"{where}: {where}", where)) from error


def _encode_structure(structure: pytree.TreeSpec, where: str) -> Any:
    """Encode a structure as tuples, lists and dicts that hold the numbers of its leaves."""

    def ordered(value: Any) -> Any:
        if isinstance(value, _CONTAINERS) and type(value) not in _CONTAINERS:
            raise CheckpointError(f"{where}: a {type(value).__name__} in it; use tuples, lists and dicts")
        if type(value) is OrderedDict:
            return {"ordered": encode_value(dict(value), where, ordered)}
        return None

    numbered = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    return encode_value(numbered, where, ordered)


def _decode_structure(data: Any, where: str) -> pytree.TreeSpec:
    special: dict[str, Special] = {}
    special["ordered"] = lambda inner: OrderedDict(decode_value(inner, where, special))
    leaves, structure = pytree.tree_flatten(decode_value(data, where, special))
    if leaves != list(range(len(leaves))):
        raise CheckpointError(f"{where} are not numbered in order")
    return structure


def decode_regions(
    manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device, own: Own | None = None
) -> list[tuple[Region, ConvertedModule]]:
    """Return the regions of a manifest, with their modules, which no model holds yet."""
    regions = []
    for entry in manifest["regions"]:
        path = str(entry["path"])
        where = f"region {path[:80]!a}"
        module = decode_graph_module(entry, "Region", tensors, device, own)
        constants = decode_value(entry["constants"], f"{where}, its arguments", {})
        form = Form(
            _decode_structure(entry["arguments"], f"{where}, its arguments"),
            tuple((int(place), value) for place, value in constants),
        )
        output = None
        if entry["output"] is not None:
            output = _decode_structure(entry["output"], f"{where}, its output")
        regions.append((Region(path, form, output, module.graph, ()), module))
    return regions


def put_regions(
    model: nn.Module,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    own: Own | None = None,
) -> None:
    """Give a model of the user's class the regions, layers and tensors of a manifest.

    `CheckpointError` if the model does not match the file; it may be half changed by then.
    """
    for region, part in decode_regions(manifest, tensors, device, own):
        module = _submodule(model, region.path)
        module.__dict__.pop("forward", None)
        _put(module, part)
        for node in part.graph.nodes:
            if node.op == "get_attr" and held(module, str(node.target)) is not held(part, str(node.target)):
                raise _other(model, f"{region.path}.{node.target} cannot be set")
        signature = inspect.signature(module.forward)
        module.__dict__["forward"] = RegionForward(module, part.graph, region, signature)
    for entry in manifest["layers"]:
        module, layer = _submodule(model, entry["path"]), decode_modules(entry["modules"], set(), tensors)
        if type(module) is not type(layer.get_submodule(_LAYER)):
            raise _other(model, f"{entry['path']!r} is a {type(module).__name__} there")
        _put(module, layer.get_submodule(_LAYER))
    for name, saved in manifest["rest"].items():
        _set_tensor(model, str(name), tensors[saved])
    training = set(manifest["training"])
    for path, module in model.named_modules():
        module.training = path in training


def _put(mine: nn.Module, saved: nn.Module) -> None:
    """Copy a saved module's contents into ``mine``. No graph reads the rest of ``mine``: it stays."""
    for table in ("_parameters", "_buffers"):
        for name, tensor in vars(saved)[table].items():
            if name not in vars(mine)[table]:
                for place in (vars(mine), mine._parameters, mine._buffers, mine._modules):
                    place.pop(name, None)
            vars(mine)[table][name] = tensor
    mine._non_persistent_buffers_set |= saved._non_persistent_buffers_set
    for name, value in vars(saved).items():
        if name not in MODULE_FIELDS and (name in vars(mine) or type(mine) is type(saved)):
            vars(mine)[name] = value
    for name, child in saved._modules.items():
        own = mine._modules.get(name)
        if own is not None and child is not None and type(child) in (nn.Module, type(own)):
            _put(own, child)
        else:
            mine._modules[name] = child


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    owner = _submodule(model, path)
    tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
    for table in tables:
        old = table.get(attribute)
        if old is not None and old.shape == tensor.shape and type(old) is type(tensor):
            table[attribute] = tensor
            return
    raise _other(model, f"{name!r} is not a tensor of shape {tuple(tensor.shape)} there")


def _submodule(model: nn.Module, path: Any) -> nn.Module:
    try:
        return model.get_submodule(str(path))
    except AttributeError:
        raise _other(model, f"there is no module {str(path)[:80]!a}") from None


def _other(model: nn.Module, why: str) -> CheckpointError:
    return CheckpointError(
        f"{type(model).__name__} is not the model that the file was saved from: {why}. Pass into= a model made in "
        "the same way."
    )


def _is_layer(module: nn.Module) -> bool:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    tensors = any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    )
    return tensors and name in specifications() and not any(getattr(module, hooks) for hooks in HOOKS)


def _is_in(path: str, region: str) -> bool:
    return path == region or path.startswith(f"{region}.")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
