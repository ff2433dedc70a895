"""Save a converted model as two files, tensors and manifest, and load it without its original class.

    pruned.safetensors   every tensor once, shared ones included
    pruned.json          the graph, the leaf modules' classes and attributes, the tensor file's sha256 and its own

No code is stored, and loading evaluates none. A file may name only the functions, tensor methods and
attributes of `safe_operations`, the module classes of `safe_modules` (both are closed lists), and the
autograd functions given to `load`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, fx, nn

from smcp_fx.errors import CheckpointError, InputError
from smcp_fx.interface.output_types import plain_containers
from smcp_fx.interface.wrapping import is_prepared, require_whole, unwrapped
from smcp_fx.regions import graph_of, runs_in_regions
from smcp_fx.serialization.converted import ConvertedModule
from smcp_fx.serialization.graph_codec import Own, own_functions
from smcp_fx.serialization.graph_module_codec import decode_graph_module, encode_graph_module
from smcp_fx.serialization.region_codec import decode_regions, encode_regions, put_regions
from smcp_fx.serialization.saved_names import is_identifier
from smcp_fx.storage.files import bounded_json
from smcp_fx.storage.tensor_file import TensorWriter, restore, write_together
from smcp_fx.storage.versions import library_versions, saved_with
from smcp_fx.tracing.autograd_functions import Applied
from smcp_fx.tracing.copying import deep_copy

Model = TypeVar("Model", bound=nn.Module)
Functions = Sequence[type[torch.autograd.Function]]

FORMAT = "smcp_fx.model"
FORMAT_VERSION = 2
_SUFFIX = ".safetensors"
#: Larger than any network's manifest: 200,000 nodes of 300 characters each.
_MANIFEST_BYTES = 1 << 26
#: The manifest's last line: the sha256 of everything before it.
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n')
#: Errors that a manifest of wrong content may raise.
_OF_WRONG_CONTENT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError),
    *(RecursionError, RuntimeError, SafetensorError, SyntaxError, TypeError, ValueError),
)
_SEAL_BYTES = len(',\n "sha256": ""\n}\n') + 64


def save(converted: nn.Module, path: Path | str, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a converted model to ``path`` (``*.safetensors``) and its manifest beside it (``*.json``).

    ``metadata`` (kept counts, target, source: anything JSON can hold) goes into the manifest, and `read_metadata`
    returns it. Both files are written in full under temporary names, then renamed. The same model gives the same
    bytes. Attributes that neither a module's class nor the graph reads are left out. Returns the path of the tensor
    file.

    The file of a model that was traced in regions lacks the model's Python: see `load`.

    A file holds no classes of outputs: the loaded model returns a tuple for a named tuple and a dict for a
    dataclass or `ModelOutput`; a `UserWarning` says so. `OrderedDict` stays.

    Errors: `InputError` for arguments of the wrong kind; `CheckpointError` for a node or module that a file
    cannot hold (both named), and when writing fails.
    """
    path = Path(path)
    if path.suffix != _SUFFIX:
        raise InputError(
            f"a model is saved to a *{_SUFFIX} file, its manifest beside it as *.json; not to {path}"
        )
    if not isinstance(converted, nn.Module):
        raise InputError(f"save needs what smcp_fx.convert returned, not {type(converted).__name__}")
    converted = unwrapped(converted)
    require_whole(converted, "save")
    if is_prepared(converted):
        raise InputError("a prepared model is not saved: save smcp_fx.convert(prepared), or its state_dict()")
    try:
        noted = bounded_json(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"the metadata cannot be written as JSON ({error}); use numbers, strings, lists, dicts"
        ) from error
    content, manifest = _contents(converted, noted)
    became = plain_containers(converted.graph)[1] if isinstance(converted, fx.GraphModule) else {}
    if became:
        kinds = ", ".join(f"a {kind} in place of {name}" for name, kind in became.items())
        warnings.warn(
            f"{path}: a file holds no classes of yours. Loaded, {type(converted).__name__} returns {kinds}, with the "
            "same contents. torch.save keeps the classes.",
            stacklevel=2,
        )
    write_together({path: content, _manifest_path(path): manifest})
    return path


@overload
def load(
    path: Path | str, map_location: str | torch.device = ..., *, functions: Functions = ...
) -> ConvertedModule: ...
@overload
def load(
    path: Path | str, map_location: str | torch.device = ..., *, into: Model, functions: Functions = ...
) -> Model: ...
def load(
    path: Path | str,
    map_location: str | torch.device = "cpu",
    *,
    into: nn.Module | None = None,
    functions: Functions = (),
) -> nn.Module:
    """Read a saved model as a plain `GraphModule`, with tensors and device constants on ``map_location``.

    A model that was traced in regions is loaded into a copy of ``into``, a model of its class made like the
    original: the file holds its regions, its other layers and its tensors, but not its Python. ``functions``:
    the classes derived from `torch.autograd.Function` that the model applies; the file has only their names.

    Modules are in the modes (train or eval) they were saved in. Raises `CheckpointError` for files that are
    missing, damaged, from different saves, or of another version; for names that a model may not use; and for
    regions without a place in ``into``.
    """
    path = Path(path)
    try:
        device = torch.empty(0, device=map_location).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"map_location {map_location!r} is not a device of this machine: {error}") from error
    own = own_functions(functions)
    manifest = _read_manifest(path)
    _check_tensor_file(path, manifest)
    model = _of_class(into, manifest, path)
    with _damaged(path, manifest):
        tensors = restore(safetensors.torch.load_file(path), manifest["tensors"], device)
        if model is None:
            return decode_graph_module(manifest, manifest["class"], tensors, device, own)
        put_regions(model.to(device), manifest, tensors, device, own)
        return model


def applied_classes(converted: nn.Module) -> list[type[torch.autograd.Function]]:
    """Return the autograd functions that a converted model applies, and that `load` needs."""
    graphs = [part.graph for part in map(graph_of, converted.modules()) if isinstance(part, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    return list(dict.fromkeys(target.cls for target in targets if isinstance(target, Applied)))


def check_savable(converted: nn.Module) -> None:
    """Raise the error that `save` would raise for this kind of model; write nothing."""
    _encoded(converted, {}, TensorWriter())


def _contents(converted: nn.Module, metadata: Mapping[str, Any]) -> tuple[bytes, bytes]:
    tensors = TensorWriter()
    manifest = _encoded(converted, metadata, tensors)
    try:
        # Only one metadata entry: safetensors writes several in varying order.
        content = safetensors.torch.save(tensors.stored, {"format": "pt"})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the tensors cannot be written as safetensors: {error}") from error
    manifest["tensor_file"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    text = render(manifest)
    if len(text) > _MANIFEST_BYTES:
        raise CheckpointError(
            f"its manifest would have {len(text)} bytes, more than the {_MANIFEST_BYTES} that load reads: keep the "
            "metadata short"
        )
    return content, text


def _encoded(converted: nn.Module, metadata: Mapping[str, Any], tensors: TensorWriter) -> dict[str, Any]:
    name = type(converted).__name__
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "libraries": library_versions(),
        "class": name if is_identifier(name) else "GraphModule",
        "metadata": metadata,
    }
    if runs_in_regions(converted):
        manifest |= encode_regions(converted, tensors)
    elif isinstance(converted, fx.GraphModule):
        manifest |= encode_graph_module(converted, tensors)
    else:
        raise InputError(
            f"save needs what smcp_fx.convert returned, not {name}: of a model of your own class, save the "
            "state_dict(), which smcp_fx.resize takes"
        )
    manifest["tensors"] = tensors.entries
    try:  # refuse models that could not be loaded
        _try_to_decode(manifest, tensors.stored, own_functions(applied_classes(converted)))
    except CheckpointError:
        raise
    except _OF_WRONG_CONTENT as error:
        raise CheckpointError(
            f"the model does not match its layers' attributes: {type(error).__name__}: {error}"
        ) from error
    return manifest


def _try_to_decode(manifest: Mapping[str, Any], stored: Mapping[str, Tensor], own: Own) -> None:
    """Decode a manifest without the numbers."""
    device = torch.device("meta")
    tensors = restore(stored, manifest["tensors"], device)
    if "regions" in manifest:
        decode_regions(manifest, tensors, device, own)
    else:
        decode_graph_module(manifest, manifest["class"], tensors, device, own)


def _of_class(into: nn.Module | None, manifest: Mapping[str, Any], path: Path) -> nn.Module | None:
    """Return a copy of ``into``, if the file needs one; `InputError` if it does not fit the file."""
    name = str(manifest.get("class"))[:80]
    if "regions" not in manifest:
        if into is not None:
            raise InputError(
                f"{path} holds a whole network: smcp_fx.resize(model, smcp_fx.load(path)) puts it into your class"
            )
        return None
    if into is None:
        raise InputError(
            f"{path} holds the parts of a {name} that was traced in regions; the rest is its own Python. Make a "
            f"{name} as you made the original, and pass it: load(path, into=model)"
        )
    if not isinstance(into, nn.Module) or is_prepared(into) or type(into).__name__ != name:
        raise InputError(f"{path} was saved from a {name}; into= is a {type(into).__name__}")
    return deep_copy(into)


def read_metadata(path: Path | str) -> dict[str, Any]:
    """Return the metadata that `save` was given for the model at ``path``; errors as for `load`."""
    path = Path(path)
    manifest = _read_manifest(path)
    with _damaged(path, manifest):
        return dict(manifest["metadata"])


def _manifest_path(path: Path) -> Path:
    if not path.name:
        raise CheckpointError(f"{path} is a folder: give a file in it")
    return path.with_suffix(".json")


def render(manifest: Mapping[str, Any]) -> bytes:
    """Return the JSON and its sha256; one line per node, module and tensor keeps diffs readable."""
    lines = []
    for key, value in manifest.items():
        if key == "sha256":
            continue
        content = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value:
            content = "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {content}")
    text = ("{\n" + ",\n".join(lines)).encode()
    return text + f',\n "sha256": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest_path = _manifest_path(path)
    if path.suffix != _SUFFIX:
        raise CheckpointError(
            f"{path} is not a *{_SUFFIX} file: pass the tensor file that smcp_fx.save wrote; its manifest is "
            "found beside it"
        )
    for file, kind in ((path, "model"), (manifest_path, "manifest")):
        if not file.is_file():
            raise CheckpointError(
                f"there is no {kind} file {file}: smcp_fx.save writes {path.name} and {manifest_path.name}; keep "
                "both in one directory, under one name"
            )
    try:
        if manifest_path.stat().st_size > _MANIFEST_BYTES:
            raise CheckpointError(
                f"{manifest_path} is larger than any model's manifest: save the model again"
            )
        content = manifest_path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{manifest_path} cannot be read: {error}") from error
    return _parsed(content, manifest_path)


def _parsed(content: bytes, manifest_path: Path) -> dict[str, Any]:
    try:
        manifest = bounded_json(content.decode("utf-8"))
    except ValueError as error:
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
            f"{FORMAT_VERSION}. Load it with the smcp_fx that wrote it {saved_with(manifest)}, or save it again."
        )
    sealed, last = content[:-_SEAL_BYTES], _SEAL.fullmatch(content[-_SEAL_BYTES:])
    if last is None or last[1].decode() != hashlib.sha256(sealed).hexdigest():
        raise CheckpointError(
            f"{manifest_path} is damaged (its sha256 differs): it was changed after it was written. Copy it again, "
            "or save the model again"
        )
    return manifest


def _check_tensor_file(path: Path, manifest: Mapping[str, Any]) -> None:
    with _damaged(path, manifest):
        digest, size = str(manifest["tensor_file"]["sha256"]), int(manifest["tensor_file"]["bytes"])
    try:
        actual = path.stat().st_size
        if actual < size:
            raise CheckpointError(
                f"{path} is cut off: {actual} of {size} bytes are there. Copy it again, or save the model again."
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
            "from different saves, or the file was changed. Use the two files of one smcp_fx.save, or save again."
        )


@contextlib.contextmanager
def _damaged(path: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
    """Turn any error from a manifest with wrong content into one clear error."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error} {saved_with(manifest)}") from error
    except _OF_WRONG_CONTENT as error:
        raise CheckpointError(
            f"{_manifest_path(path)} is damaged ({type(error).__name__}: {error}): copy it again, or save the "
            f"model again {saved_with(manifest)}"
        ) from error
