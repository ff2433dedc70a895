"""Networks of ONNX files for the commands: their input sizes, and random inputs of any batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smcp_fx.backends import import_runtime
from smcp_fx.errors import InputError
from smcp_fx.zoo.pretrained import numbers_of


def read_network(path: Path | str, size: str | None = None) -> Any:
    """Return a file's network, a graph module.

    ``size``: its inputs' sizes without the batch: "3x48x320", or "320" for all open axes; commas separate
    inputs. By default, the size in the file's metadata, or one that the network takes. Raises `InputError`.
    """
    reading = import_runtime("smcp_fx.backends.onnx.importing.reading", "onnx:", "pip install onnxruntime")
    file = reading.read_onnx(path)
    interface = file.interface
    if size is None and any(axis for port in interface.inputs for axis in port.open_axes):
        size = "x".join(f"{number:g}" for number in numbers_of(interface.metadata.get("imgsz", "")))
    example = interface.random_inputs(interface.shapes_of(size)) if size else None
    return reading.imported(file, example)


def takes_several(model: Any) -> bool:
    """Whether a file's network takes several samples at a time."""
    ports = model.meta["onnx"].inputs
    return all(0 in port.open_axes for port in ports) or len(model.example_input_array[0]) > 1


def examples_of(model: Any, batch: int) -> tuple[Tensor, ...]:
    """Return random inputs for a batch of this size; `InputError` if the network does not take it."""
    first: tuple[Tensor, ...] = model.example_input_array
    if not takes_several(model) and batch != len(first[0]):
        raise InputError(f"the file takes {len(first[0])} samples at a time: give --batch {len(first[0])}")
    return tuple(torch.cat([tensor] * -(-batch // len(tensor)))[:batch] for tensor in first)


def writer_like(model: Any) -> Any:
    """Return a writer of files like an imported network's own, for a `Backend`."""
    return _importing("writing").Writer(model.meta["onnx"])


def _importing(name: str) -> Any:
    return import_runtime(f"smcp_fx.backends.onnx.importing.{name}", "onnx:", "pip install onnxruntime")
