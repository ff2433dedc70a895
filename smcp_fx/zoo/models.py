"""Models by name, fitted to the data's classes, channels and size."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.errors import InputError, first_line
from smcp_fx.interface.example_inputs import first_convolution, shape_of_text
from smcp_fx.tracing.example_runs import run_eager
from smcp_fx.zoo.data import ImageData, call_factory
from smcp_fx.zoo.onnx_file import examples_of, read_network
from smcp_fx.zoo.weights import Weights, load_weights

#: Most numbers in a batch of images: 4 GiB.
_MOST_VALUES = 2**30
_SIZES = (32, 64, 96, 128, 160, 192, 224, 256, 299)


@dataclass(frozen=True)
class FittedModel:
    """A model, and the images it takes: ``channels`` x ``size`` x ``size``; ``notes`` list adaptations.

    ``accuracy``: the published accuracy of its weights, a fraction; None if unknown. ``trained``: all layers
    came with weights.
    """

    model: nn.Module
    name: str
    channels: int
    size: int
    notes: tuple[str, ...]
    accuracy: float | None = None
    trained: bool = False
    output_names: tuple[str, ...] = ()  # of an ONNX file

    def examples(self, batch: int) -> tuple[Tensor, ...]:
        """Return random inputs for a batch of this size."""
        if self.output_names:
            return examples_of(self.model, batch)
        return (example_images(batch, self.channels, self.size, self.size),)


def load_model(
    spec: str,
    data: ImageData,
    weights: Weights | None = None,
    base: Path | None = None,
    *,
    size: int | None = None,
) -> FittedModel:
    """Build ``torchvision:NAME``, ``timm:NAME`` or ``path/to/file.py:factory`` for the data's classes.

    ``base``: the folder that relative paths start from (default: the working directory).

    Images are resized to ``size``; by default, images too small for the model are enlarged to the smallest size that
    works. A grey image is repeated over the model's input channels. A torchvision ResNet on images up to 64
    pixels gets a 3x3 stem of stride 1 with the data's channels, unless weights are given.

    Raises `InputError` if nothing fits.
    """
    notes: list[str] = []
    model, name = _classifier(spec, data, weights, base, notes)
    channels, fitting = _fit(model, spec, data, [size] if size else None)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{spec}: all its parameters are frozen (requires_grad=False): nothing can be trained"
        )
    if channels != data.channels:
        notes.append(
            f"images of {data.channels} channel{'s' * (data.channels > 1)} given on {channels} channels"
        )
    if fitting != data.size:
        why = "as asked" if size else "the smallest size the model takes"
        notes.append(f"images resized from {data.size} to {fitting} pixels, {why}")
    if weights is not None:
        weights = load_weights(model, weights, data.classes or None)
        notes += weights.notes
    return FittedModel(
        model,
        name,
        channels,
        fitting,
        tuple(notes),
        None if weights is None else weights.accuracy,
        weights is not None and weights.whole,
    )


def _classifier(
    spec: str, data: ImageData, weights: Weights | None, base: Path | None, notes: list[str]
) -> tuple[nn.Module, str]:
    """Return the model, built for the data's classes and channels, and its name; extends ``notes``."""
    kind, _, name = spec.partition(":")
    classes = data.classes or _classes_of(weights)
    if kind == "timm" and name:
        own = {} if weights is not None else {"in_chans": data.channels}
        return _create_timm(name, num_classes=classes, **own), name
    if kind != "torchvision" or not name:
        return _from_factory(spec, base), spec
    model = _torchvision(name, classes)
    if weights is None and data.size <= 64 and type(model).__name__ == "ResNet":
        stem: Any = model.conv1
        model.conv1 = nn.Conv2d(data.channels, stem.out_channels, 3, 1, 1, bias=False)
        notes.append(
            f"stem adapted to {data.size}x{data.size} images: 3x3 convolution of stride 1 on {data.channels} "
            f"channel{'s' * (data.channels > 1)}"
        )
    return model, name


def _classes_of(weights: Weights | None) -> int:
    """Return the number of classes of the weights' last layer, for data without labels."""
    if weights is None:
        raise InputError("images without labels cannot train a network: give --weights or --pretrained")
    return int(list(weights.state.values())[-1].shape[0])


def build_model(spec: str, **options: Any) -> nn.Module:
    """Build ``torchvision:NAME`` (of any task), ``timm:NAME``, ``onnx:FILE``, ``smcp:NAME`` or ``file.py:factory``.

    ``smcp:`` names networks of the recipes. ``options`` go to the builder of a named network; an ONNX file
    takes ``size``, as `read_network` does. Weights are random, except those of a file. Raises `InputError`
    for networks that do not exist or cannot be built.
    """
    kind, _, name = spec.partition(":")
    if kind == "torchvision" and name:
        from torchvision import models

        _check_name(name, models.list_models(), "torchvision has no model")
        parameters = inspect.signature(models.get_model_builder(name)).parameters
        if "weights_backbone" in parameters:
            options.setdefault("weights_backbone", None)
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False  # half a minute of sampling for nothing
        try:
            model: nn.Module = models.get_model(name, weights=None, **options)
        except Exception as error:
            raise InputError(f"torchvision cannot build {name!r}: {type(error).__name__}: {error}") from error
        return model
    if kind == "timm" and name:
        return _create_timm(name, **options)
    if kind == "onnx" and name:
        network: nn.Module = read_network(name, options.get("size"))
        return network
    if kind == "smcp" and name:
        from smcp_fx.zoo.networks import build_network

        return build_network(name, **options)
    return _from_factory(spec)


def example_images(batch: int, *sizes: int) -> Tensor:
    """Return random images; `InputError` if there are more than any network takes."""
    values = batch * math.prod(sizes)
    if values > _MOST_VALUES:
        shape = "x".join(map(str, (batch, *sizes)))
        raise InputError(
            f"images of {shape} hold more than {_MOST_VALUES} numbers: take a smaller batch or smaller images"
        )
    return torch.randn(batch, *sizes)


def network_and_inputs(
    spec: str, size: str | None = None, batch: int = 2
) -> tuple[nn.Module, tuple[Tensor, ...] | None]:
    """Build a network by `build_model`, and random inputs of ``size``; without it None, but for ONNX files.

    ``size``: an image's side ("224") or its sizes but the batch ("3x224x224"); of a file, see `read_network`.
    """
    if spec.startswith("onnx:"):
        model = build_model(spec, size=size)
        return model, examples_of(model, batch)
    model = build_model(spec)
    if size is None:
        return model, None
    try:
        return model, (example_images(*shape_of_text(model, size, batch)),)
    except InputError as error:
        raise InputError(f"--input-size {size!r}: {error}") from error


def _torchvision(name: str, classes: int) -> nn.Module:
    from torchvision import models

    _check_name(name, models.list_models(module=models), "torchvision has no classification model")
    options: dict[str, Any] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options.update(aux_logits=False, init_weights=False)
    model: nn.Module = models.get_model(name, **options)
    return model


def _check_name(name: str, names: list[str], refusal: str) -> None:
    """Raise `InputError`, with similar known names, if the name is unknown."""
    if name not in names:
        near = difflib.get_close_matches(name, names, 8, 0.5) or [k for k in names if k.startswith(name[:4])]
        raise InputError(f"{refusal} {name!r}" + (f"; it has {', '.join(near[:8])}" if near else ""))


def _create_timm(name: str, **options: Any) -> nn.Module:
    try:
        import timm
    except ModuleNotFoundError as error:
        raise InputError("--model timm:NAME needs timm: pip install timm") from error
    if ":" not in name and not timm.is_model(name.partition(".")[0]):  # hf-hub:, local-dir:
        _check_name(name, timm.list_models(), "timm has no model")
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
    except Exception as error:
        raise InputError(f"timm cannot build {name!r}: {type(error).__name__}: {error}") from error
    return model


def _from_factory(spec: str, base: Path | None = None) -> nn.Module:
    if not spec.rpartition(":")[0].endswith(".py"):
        from torchvision import models

        meant = f" (did you mean torchvision:{spec}?)" if spec in models.list_models() else ""
        raise InputError(
            f"unknown model {spec!r}: give torchvision:NAME, timm:NAME, onnx:FILE, or path/to/file.py:factory{meant}"
        )
    model = call_factory(spec, base)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} must return an nn.Module, not {type(model).__name__}")
    return model


def _fit(model: nn.Module, spec: str, data: ImageData, sizes: Sequence[int] | None) -> tuple[int, int]:
    first = first_convolution(model)
    if not isinstance(first, nn.Conv2d):
        raise InputError(f"{spec} has no 2-d convolution; this command takes image classifiers")
    channels = first.in_channels
    if data.channels not in (1, channels) and channels != 1:
        raise InputError(f"{spec} takes {channels} channels, the data has {data.channels}")
    reasons = []
    for size in sizes or dict.fromkeys((data.size, *(s for s in _SIZES if s > data.size))):
        try:
            output = run_eager(model, (torch.zeros(2, channels, size, size),))
        except Exception as error:
            reasons.append(f"{size}: {first_line(error).rstrip('.')}")
            continue
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < max(data.classes, 2):
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"{spec} is not a classifier{f' of {data.classes} classes' * bool(data.classes)}: its output is "
                f"{shape}. smcp_fx.compress(model, images) takes any output"
            )
        return channels, size
    raise InputError(f"{spec} runs at none of the image sizes tried ({'; '.join(reasons[:3])})")
