"""Tensors in safetensors files: each piece of memory once, with its layout. Files are written whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.errors import CheckpointError
from smcp_fx.storage.files import check_replaceable


class TensorWriter:
    """Collects tensors: each object gets one entry; each piece of memory is stored once."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.stored: dict[str, Tensor] = {}
        self._names: set[str] = set()
        self._named: dict[int, str] = {}
        self._kept: list[Tensor] = []  # keeps their ids from being reused
        self._memory: dict[Any, str] = {}

    def add(self, name: str, tensor: Tensor, where: str) -> str:
        """Add a tensor as ``name``; return its name, an earlier one if the object was added before."""
        earlier = self._named.get(id(tensor))
        if earlier is not None:
            return earlier
        while name in self._names:
            name += "_"  # elements of lists have no name of their own
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
            "layout": dimension_order(tensor),
        }
        self.entries.append(entry)
        self._names.add(name)
        self._named[id(tensor)] = name
        self._kept.append(tensor)
        return name


def dimension_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory (channels last: 0, 2, 3, 1)."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    dense = torch.empty([tensor.shape[dim] for dim in order], device="meta").stride()
    # Views with gaps or overlaps become contiguous: only their values count.
    return order if tuple(strides[dim] for dim in order) == dense else list(range(tensor.dim()))


def restore(
    stored: Mapping[str, Tensor], entries: list[dict[str, Any]], device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors of a `TensorWriter`'s ``entries``, shared and laid out as they were."""
    if set(stored) != {entry["stored"] for entry in entries}:
        raise CheckpointError("the file holds other tensors than it lists")
    memory: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        source = stored[entry["stored"]]
        if entry["stored"] not in memory:
            order = [int(dim) for dim in entry["layout"]]
            if sorted(order) != list(range(source.dim())):
                raise CheckpointError(
                    f"{str(entry['name'])[:80]!r}: {str(order)[:80]} is not an order of {source.dim()} dimensions"
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


def raw(tensor: Tensor) -> Any:
    """Return the tensor's bytes as a NumPy array of uint8."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write all files under temporary names, then rename them; leave nothing behind on failure."""
    beside: dict[Path, Path] = {}
    try:
        for path in contents:
            check_replaceable(path)
        for path, content in contents.items():
            beside[path] = path.with_name(_temporary(path, os.getpid()))
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path)
            with open(beside[path], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, temporary in beside.items():
            os.replace(temporary, path)
        for folder in {path.parent for path in contents}:
            _sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"{' and '.join(str(path) for path in contents)} cannot be written: {error.strerror or error}. Free some "
            "space or choose a writable directory, and save again."
        ) from error
    finally:
        for temporary in beside.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def _temporary(path: Path, process: int | str) -> str:
    return f".{path.name}.{socket.gethostname()}.{process}.tmp"


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files that killed processes of this machine left behind."""
    for leftover in path.parent.glob(_temporary(Path(glob.escape(path.name)), "*")):
        process = leftover.name.split(".")[-2]
        if re.fullmatch("[0-9]{1,9}", process) and not _runs(int(process)):
            with contextlib.suppress(OSError):
                leftover.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's process
    return True


def _sync_folder(folder: Path) -> None:
    """Make the renames survive a power cut, if the system allows it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
