"""Save a converted model as two files, tensors and manifest, and load it without the class it came from.

    pruned.safetensors   every tensor once, also what several modules share
    pruned.json          the graph, the leaf modules' classes and plain attributes, and the tensor file's sha256

No code is stored and none is evaluated on loading; `smcp_fx.graph_codec` holds the lists of what may be named.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, fx, nn

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.graph_codec import (
    check_identifier,
    check_path,
    class_name,
    decode_graph,
    decode_value,
    encode_graph,
    encode_value,
    find_class,
    find_function,
    function_name,
)
from smcp_fx.prepare import PreparedModel

FORMAT = "smcp_fx.model"
FORMAT_VERSION = 1
_SUFFIX = ".safetensors"
_LIBRARIES = ("smcp_fx", "torch", "torchvision", "timm", "safetensors")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: What every module carries besides its own attributes; `torch.compile` leaves the last one.
_MODULE_FIELDS = {*vars(nn.Module()), "_compiled_call_impl"}
#: Weak references and the like that a module makes anew from its parameters.
_DERIVED: dict[type[nn.Module], set[str]] = {nn.RNNBase: {"_flat_weights", "_flat_weight_refs"}}


def save(converted: fx.GraphModule, path: Path | str, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a converted model to ``path`` (``*.safetensors``) and its manifest beside it (``*.json``).

    ``metadata`` (kept counts, target, source: anything JSON can hold) goes into the manifest, and
    `read_metadata` returns it. Both files are written in full beside their places before they are renamed.
    Returns the path of the tensor file.

    Errors: `InputError` for arguments of the wrong kind; `CheckpointError` for a node or module that a file
    cannot hold (both named), and when writing fails.
    """
    path = Path(path)
    if path.suffix != _SUFFIX:
        raise InputError(
            f"a model is saved to a *{_SUFFIX} file, its manifest beside it as *.json; not to {path}"
        )
    if isinstance(converted, PreparedModel):
        raise InputError("a prepared model is not saved: save smcp_fx.convert(prepared), or its state_dict()")
    if not isinstance(converted, fx.GraphModule):
        raise InputError(f"save needs what smcp_fx.convert returned, not {type(converted).__name__}")
    try:
        noted = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"the metadata cannot be written as JSON ({error}); use numbers, strings, lists, dicts"
        ) from error
    tensors = _TensorWriter()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "libraries": _library_versions(),
        "class": check_identifier(type(converted).__name__, "the model's class"),
        "metadata": noted,
        "graph": encode_graph(converted.graph),
        "modules": _encode_modules(converted, tensors),
        "tensors": tensors.entries,
    }
    _check_targets(converted, converted.graph)
    try:
        content = safetensors.torch.save(tensors.stored, {"format": "pt", "producer": FORMAT})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the tensors cannot be written as safetensors: {error}") from error
    manifest["tensor_file"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    _write_together({path: content, _manifest_path(path): _render(manifest).encode()})
    return path


def load(path: Path | str, map_location: str | torch.device = "cpu") -> fx.GraphModule:
    """Read what `save` wrote and return a plain `GraphModule`; tensors and device constants on ``map_location``.

    Modules are in the modes (train or eval) they were saved in. Raises `CheckpointError` for files that are
    missing, damaged, not each other's, of another version, or name code that a model may not call.
    """
    path = Path(path)
    try:
        device = torch.empty(0, device=map_location).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"map_location {map_location!r} is not a device of this machine: {error}") from error
    manifest = _read_manifest(path)
    _check_tensor_file(path, manifest)
    with _damaged(path, manifest):
        tensors = _read_tensors(path, manifest["tensors"], device)
        root = _decode_modules(manifest["modules"], tensors)
        graph = decode_graph(manifest["graph"], device)
        _check_targets(root, graph)
        module = fx.GraphModule(
            root, graph, class_name=check_identifier(manifest["class"], "the model's class")
        )
        # The constructor copies what the graph refers to; the saved order, and what it does not use, count too.
        for name, value in vars(root).items():
            if name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
                vars(module)[name] = value
            elif name not in _MODULE_FIELDS:
                vars(module).setdefault(name, value)
    return module


def read_metadata(path: Path | str) -> dict[str, Any]:
    """Return the metadata that `save` was given for the model at ``path``; errors as for `load`."""
    path = Path(path)
    manifest = _read_manifest(path)
    with _damaged(path, manifest):
        return dict(manifest["metadata"])


# ---- modules ------------------------------------------------------------------------------------------------


def _encode_modules(root: fx.GraphModule, tensors: _TensorWriter) -> list[dict[str, Any]]:
    """Every module in order, parents before children; a module at a second path refers to the first."""
    generated = set(vars(fx.GraphModule(nn.Module(), fx.Graph()))) | {"_tracer_cls", "_tracer_extras"}
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
        entries.append({"path": path, **_encode_module(module, path, where, tensors, generated)})
        for name, child in module._modules.items():
            visit(child, f"{path}.{name}" if path else name)

    visit(root, "")
    return entries


def _encode_module(
    module: nn.Module, path: str, where: str, tensors: _TensorWriter, generated: set[str]
) -> dict[str, Any]:
    is_root = not path
    kind = "torch.nn.modules.module.Module" if is_root else class_name(module, where)
    hooks = [name for name in _HOOKS if getattr(module, name)]
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
            return {"function": function_name(value, f"{where}, attribute {attribute!r}")}
        return None

    skipped = _MODULE_FIELDS | (generated if is_root else set())
    for owner, names in _DERIVED.items():
        skipped |= names if isinstance(module, owner) else set()
    attributes = {}
    for attribute, value in vars(module).items():
        if attribute not in skipped:
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


def _decode_modules(entries: list[dict[str, Any]], tensors: Mapping[str, Tensor]) -> nn.Module:
    modules: dict[str, nn.Module] = {}
    for entry in entries:
        path = entry["path"]
        where = f"module {path!r}"
        if path:
            check_path(path, where)
        if path in modules or bool(path) != bool(modules):
            raise CheckpointError(f"{where} comes twice in the manifest, or before the model itself")
        if "same_as" in entry:
            module = None if entry["same_as"] is None else modules[entry["same_as"]]
        else:
            module = _decode_module(entry, where, tensors)
        if module is not None:
            modules[path] = module
        if path:
            parent, _, name = path.rpartition(".")
            _check_name(name, where)
            modules[parent]._modules[name] = module
    return modules[""]


def _decode_module(entry: Mapping[str, Any], where: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    kind = find_class(entry["class"], where)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.training = bool(entry["training"])
    special = {"tensor": tensors.__getitem__, "function": lambda name: find_function(name, where)}
    for name, data in entry["attributes"].items():
        check_identifier(_check_name(name, where), where)
        if callable(getattr(kind, name, None)):
            raise CheckpointError(f"{where}: {name!r} would hide a method of {kind.__name__}")
        vars(module)[name] = decode_value(data, f"{where}, attribute {name!r}", special)
    for name, reference in entry["parameters"].items():
        parameter = None if reference is None else tensors[reference]
        if not (parameter is None or isinstance(parameter, nn.Parameter)):
            raise CheckpointError(f"{where}: {name!r} should be a parameter and is a buffer in the manifest")
        module._parameters[_check_name(name, where)] = parameter
    for name, (reference, persistent) in entry["buffers"].items():
        buffer = None if reference is None else tensors[reference]
        module.register_buffer(_check_name(name, where), buffer, persistent=bool(persistent))
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return module


def _check_name(name: Any, where: str) -> str:
    """A name in a module's own tables: one path atom that hides nothing every module has."""
    if "." in check_path(name, where) or name in _MODULE_FIELDS:
        raise CheckpointError(f"{where}: {name!r} is not a name that a saved model may use")
    return str(name)


def _check_targets(root: nn.Module, graph: fx.Graph) -> None:
    """Every module the graph calls and every value it reads is there; what it reads is no module."""
    for node in graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        owner, _, name = str(node.target).rpartition(".")
        try:
            parent = root.get_submodule(owner)
        except AttributeError:
            parent = None
        found = None if parent is None else {**vars(parent), **_members(parent)}.get(name)
        expected = nn.Module if node.op == "call_module" else (Tensor, bool, int, float, str, tuple, list)
        if not isinstance(found, expected):
            wanted = "a module" if node.op == "call_module" else "a tensor or a plain value"
            raise CheckpointError(
                f"node {node.name!r} needs {wanted} {str(node.target)!r}; the model has "
                f"{'none' if found is None else type(found).__name__} there"
            )


def _members(module: nn.Module) -> dict[str, Any]:
    return {**module._buffers, **module._parameters, **module._modules}


# ---- tensors ------------------------------------------------------------------------------------------------


class _TensorWriter:
    """Collects tensors: each object gets one entry, each piece of memory is stored once."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.stored: dict[str, Tensor] = {}
        self._names: set[str] = set()
        self._named: dict[int, str] = {}
        self._kept: list[Tensor] = []  # ids stay valid while their objects live
        self._memory: dict[Any, str] = {}

    def add(self, name: str, tensor: Tensor, where: str) -> str:
        """Take a tensor under ``name``, or return the name under which the same object was taken before."""
        known = self._named.get(id(tensor))
        if known is not None:
            return known
        while name in self._names:
            name += "_"  # tensors in lists, whose elements have no name of their own
        if type(tensor) not in (Tensor, nn.Parameter) or (
            tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta"
        ):
            raise CheckpointError(
                f"{where}: {name!r} is a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, on "
                f"{tensor.device}); only plain dense tensors with values can be saved"
            )
        memory = (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride())
        stored = self._memory.setdefault(memory, name) if tensor.numel() else name
        if stored == name:
            values = tensor.detach().resolve_conj().resolve_neg().to("cpu")
            self.stored[name] = values.contiguous()
        entry = {
            "name": name,
            "stored": stored,
            "parameter": isinstance(tensor, nn.Parameter),
            "requires_grad": tensor.requires_grad,
            "layout": _dimension_order(tensor),
        }
        self.entries.append(entry)
        self._names.add(name)
        self._named[id(tensor)] = name
        self._kept.append(tensor)
        return name


def _dimension_order(tensor: Tensor) -> list[int]:
    """The dimensions from the slowest to the fastest in memory (channels last: 0, 2, 3, 1)."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    dense = torch.empty([tensor.shape[dim] for dim in order], device="meta").stride()
    # Views with gaps or overlaps become contiguous; their values are what counts.
    return order if tuple(strides[dim] for dim in order) == dense else list(range(tensor.dim()))


def _read_tensors(path: Path, entries: list[dict[str, Any]], device: torch.device) -> dict[str, Tensor]:
    stored = safetensors.torch.load_file(path)
    if set(stored) != {entry["stored"] for entry in entries}:
        raise CheckpointError(f"{path} holds other tensors than its manifest {_manifest_path(path)} lists")
    memory: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        source = stored[entry["stored"]]
        if entry["stored"] not in memory:
            order = [int(dim) for dim in entry["layout"]]
            if sorted(order) != list(range(source.dim())):
                raise CheckpointError(
                    f"{entry['name']!r}: {order} is not an order of {source.dim()} dimensions"
                )
            empty = torch.empty([source.shape[dim] for dim in order], dtype=source.dtype, device=device)
            memory[entry["stored"]] = empty.permute([order.index(dim) for dim in range(len(order))]).copy_(
                source
            )
        values, gradient = memory[entry["stored"]].detach(), bool(entry["requires_grad"])
        is_parameter = bool(entry["parameter"])
        tensors[entry["name"]] = (
            nn.Parameter(values, gradient) if is_parameter else values.requires_grad_(gradient)
        )
    return tensors


# ---- files --------------------------------------------------------------------------------------------------


def _manifest_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _render(manifest: Mapping[str, Any]) -> str:
    """JSON with one line a node, module and tensor, so that two manifests can be compared line by line."""
    lines = []
    for key, value in manifest.items():
        content = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value:
            content = "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {content}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _write_together(contents: Mapping[Path, bytes]) -> None:
    """Write all files beside their places, then rename them; leave nothing behind when something fails."""
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(beside[path], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in beside.items():
            os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"{next(iter(contents))} and its manifest cannot be written: {error}. Free some space or choose a "
            "directory that can be written to, and save again."
        ) from error
    finally:
        for temporary in beside.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest_path = _manifest_path(path)
    if path.suffix != _SUFFIX:
        raise CheckpointError(
            f"{path} is not a *{_SUFFIX} file: pass the tensor file that smcp_fx.save wrote; its manifest is "
            "found beside it"
        )
    for file, what in ((path, "model"), (manifest_path, "manifest")):
        if not file.is_file():
            raise CheckpointError(
                f"there is no {what} file {file}: smcp_fx.save writes {path.name} and {manifest_path.name}; keep "
                "both in one directory, under one name"
            )
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{manifest_path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{manifest_path} is damaged ({error}): copy it again, or save the model again"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{manifest_path} is not a manifest of smcp_fx.save: pass the path that save was given, and see that "
            "no other program wrote a file of that name"
        )
    if manifest.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{manifest_path} has format version {manifest.get('version')!r}; this smcp_fx reads version "
            f"{FORMAT_VERSION}. Load it with the smcp_fx that wrote it {_saved_with(manifest)}, or save it again."
        )
    return manifest


def _check_tensor_file(path: Path, manifest: Mapping[str, Any]) -> None:
    with _damaged(path, manifest):
        digest, size = str(manifest["tensor_file"]["sha256"]), int(manifest["tensor_file"]["bytes"])
    try:
        found = path.stat().st_size
        if found < size:
            raise CheckpointError(
                f"{path} is cut off: {found} of {size} bytes are there. Copy it again, or save the model again."
            )
        hasher = hashlib.sha256()
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if hasher.hexdigest() != digest:
        raise CheckpointError(
            f"{path} is not the file that {_manifest_path(path)} describes (its sha256 differs): the two come "
            "from different saves, or the file was changed. Put together what one smcp_fx.save wrote, or save again."
        )


@contextlib.contextmanager
def _damaged(path: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever a manifest of the right version but with wrong content leads to into one clear error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error} {_saved_with(manifest)}") from error
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError),
        *(RecursionError, RuntimeError, SafetensorError, SyntaxError, TypeError, ValueError),
    ) as error:
        raise CheckpointError(
            f"{_manifest_path(path)} is damaged ({type(error).__name__}: {error}): copy it again, or save the "
            f"model again {_saved_with(manifest)}"
        ) from error


def _saved_with(manifest: Mapping[str, Any]) -> str:
    libraries = manifest.get("libraries")
    if not isinstance(libraries, dict):
        return "(saved with unknown versions)"
    return f"(saved with {', '.join(f'{name} {version}' for name, version in libraries.items())})"
