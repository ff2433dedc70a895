"""Runs that begin with an ONNX file: its network and samples, and its names in the files that are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from smcp_fx.backends import import_runtime
from smcp_fx.calibration.batches import device_of
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.errors import InputError
from smcp_fx.outcomes import in_mode
from smcp_fx.zoo.answers import divergence, outputs_of, told
from smcp_fx.zoo.data import ImageData
from smcp_fx.zoo.models import FittedModel
from smcp_fx.zoo.pretrained import Preprocessing
from smcp_fx.zoo.samples import Samples, as_tuple, load_samples

#: Samples that go through the network at a time. Chosen, not measured.
_AT_ONCE = 32


def network_and_samples(
    settings: CompileSettings, images: Preprocessing, base: Path, tell: Teller
) -> tuple[FittedModel, Samples]:
    """Return the network of the file that the settings name, and its samples. Raises `InputError`."""
    if settings.trains:
        raise InputError(
            "an ONNX file is pruned without training: give --epochs 0; smcp_fx.from_onnx gives its network to a "
            "training loop of yours"
        )
    file = base / settings.model.partition(":")[2]
    reading = _reading("reading")
    shapes = None if settings.input_shape is None else _shapes(settings.input_shape)
    with tell.stage(f"reading {file.name}, and comparing it in ONNX Runtime"):
        model = reading.from_onnx(file, None if shapes is None else reading.inputs_of(file, shapes))
    interface, first = model.meta[reading.INTERFACE], model.example_input_array
    inputs = tuple(tensor[:1] for tensor in first)
    most = _AT_ONCE if _takes(model, tuple(torch.cat([t, t]) for t in inputs)) else 1
    with torch.no_grad():
        outputs = outputs_of(model(*inputs))
    if not outputs:
        raise InputError(f"{file}: the network has no outputs of numbers, by which channels could be chosen")
    examples = {port.name: tensor for port, tensor in zip(interface.inputs, inputs, strict=True)}
    samples = load_samples(settings.data, base, examples, images, most)
    names = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in examples.items())
    notes = [f"inputs {names}", *(f"an output is taken for {told(output)}" for output in outputs)]
    if most == 1:
        notes.append("the file takes one sample at a time")
    return FittedModel(model, str(settings.model), 0, 0, tuple(notes), None, True, inputs), samples


def held_out_divergence(network: nn.Module, data: ImageData) -> float:
    """Return how far a network's outputs are from those kept beside the test samples, the mean over samples."""
    total, count, device = 0.0, 0, device_of(network)
    with torch.no_grad(), in_mode(network, False):
        for inputs, wanted in data.tests(_AT_ONCE, 0, 0):
            found = outputs_of(network(*(value.to(device) for value in as_tuple(inputs))))
            total += divergence(tuple(output.cpu() for output in found), tuple(wanted))
            count += len(as_tuple(inputs)[0])
    return total / count


def _takes(model: Any, inputs: tuple[torch.Tensor, ...]) -> bool:
    try:
        with torch.no_grad():
            torch.fx.Interpreter(model).run(*inputs)
    except Exception:  # whatever it is that a network of one sample raises
        return False
    return True


def take_over_names(fitted: FittedModel, folder: Path, tell: Teller) -> None:
    """Give the run's files the names and metadata of the file that it began with."""
    if fitted.inputs is None:
        return
    model: Any = fitted.model
    interface = model.meta[_reading("reading").INTERFACE]
    closed: tuple[str, ...] = ()
    for path in sorted({folder / "dense.onnx", folder / "pruned.onnx", *folder.glob("pruned-*.onnx")}):
        closed = _reading("writing").take_over(path, interface)
    if closed:
        tell.note(f"open in the file, and fixed in those written, at what was measured: {', '.join(closed)}")


def _reading(name: str) -> Any:
    return import_runtime(
        f"smcp_fx.backends.onnx.importing.{name}", "--model onnx:", "pip install onnxruntime"
    )


def _shapes(text: str) -> list[tuple[int, ...]]:
    try:
        return [tuple(int(size) for size in part.split("x")) for part in text.lower().split(",")]
    except ValueError as error:
        raise InputError(f"--input-shape {text!r}: give sizes without the batch, such as 3x48x320") from error
