"""Runs that begin with an ONNX file: its network, and the samples to prune it by."""

from __future__ import annotations

from pathlib import Path

from smcp_fx.backends import Backend
from smcp_fx.compiler.settings import CompileSettings
from smcp_fx.compiler.telling import Teller
from smcp_fx.errors import InputError
from smcp_fx.zoo.models import FittedModel
from smcp_fx.zoo.onnx_file import examples_of, read_network, takes_several, writer_like
from smcp_fx.zoo.pretrained import preprocessing_by
from smcp_fx.zoo.samples import Samples, load_samples

#: Samples that go through the network at a time. Chosen, not measured.
_AT_ONCE = 32


def network_and_samples(
    settings: CompileSettings, base: Path, backend: Backend, tell: Teller
) -> tuple[FittedModel, Samples]:
    """Return the settings' ONNX network and its samples, and make the backend write files like the given one.

    Raises `InputError`.
    """
    if settings.trains:
        raise InputError(
            "an ONNX file is pruned without training: give --epochs 0; smcp_fx.from_onnx gives its network to a "
            "training loop of yours"
        )
    file = base / settings.model.partition(":")[2]
    with tell.stage(f"reading {file.name}, and comparing it in ONNX Runtime"):
        model = read_network(file, settings.input_size)
    interface, several = model.meta["onnx"], takes_several(model)
    backend.writer = writer_like(model)
    images, entries = preprocessing_by(interface.metadata)
    images = settings.prepared(images)
    shown = [(port, tensor[:1]) for port, tensor in zip(interface.inputs, examples_of(model, 1), strict=True)]
    examples = {port.name: tensor for port, tensor in shown}
    samples = load_samples(settings.data, base, examples, images, _AT_ONCE if several else 1)
    notes = [f"inputs {', '.join(f'{name} {list(tensor.shape)}' for name, tensor in examples.items())}"]
    if settings.data.startswith("images:"):
        said = f"the file's metadata say so ({entries})" if entries else "by default, as for ImageNet"
        notes.append(
            f"images: {images.normalisation()}; {said}; --mean, --std and --channel-order say otherwise"
        )
    if not several:
        notes.append("the file takes one sample at a time")
    names = tuple(port.name for port in interface.outputs)
    return FittedModel(model, settings.model, 0, 0, tuple(notes), None, True, names), samples
