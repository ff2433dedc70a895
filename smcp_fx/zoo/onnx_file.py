"""Networks of ONNX files for the commands: the sizes they are read at, and inputs of so many samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smcp_fx.backends import import_runtime
from smcp_fx.errors import InputError
from smcp_fx.zoo.pretrained import numbers_of


def read_network(path: Path | str, size: str | None = None) -> Any:
    """Return the network of a file, a graph module.

    ``size``: of its inputs, without the batch: "3x48x320", "320" of all open axes, several inputs with commas. By
    default the size that the file's metadata names, or one that the network takes. Raises `InputError`.
    """
    reading = import_runtime("smcp_fx.backends.onnx.importing.reading", "onnx:", "pip install onnxruntime")
    file = reading.read_onnx(path)
    interface = file.interface
    if size is None and any(axis for port in interface.inputs for axis in port.open_axes):
        size = "x".join(f"{number:g}" for number in numbers_of(interface.metadata.get("imgsz", "")))
    example = interface.random_inputs(interface.shapes_of(size)) if size else None
    return reading.imported(file, example)


def takes_several(model: Any) -> bool:
    """Does a network of a file take several samples at a time?"""
    ports = model.meta["onnx"].inputs
    return all(0 in port.open_axes for port in ports) or len(model.example_input_array[0]) > 1


def examples_of(model: Any, batch: int) -> tuple[Tensor, ...]:
    """Return random inputs of so many samples; `InputError` where the network does not take them."""
    first: tuple[Tensor, ...] = model.example_input_array
    if not takes_several(model) and batch != len(first[0]):
        raise InputError(f"the file takes {len(first[0])} samples at a time: give --batch {len(first[0])}")
    return tuple(torch.cat([tensor] * -(-batch // len(tensor)))[:batch] for tensor in first)


def writer_like(model: Any) -> Any:
    """Return what writes files like that of an imported network, for a `Backend`."""
    return _importing("writing").Writer(model.meta["onnx"])


def _importing(name: str) -> Any:
    return import_runtime(f"smcp_fx.backends.onnx.importing.{name}", "onnx:", "pip install onnxruntime")
