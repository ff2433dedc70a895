"""Inputs to run a model on: given ones, ones made from a size, and guessed ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smcp_fx.errors import InputError, first_line
from smcp_fx.tracing.call_forms import parameters_of
from smcp_fx.tracing.example_runs import run_eager

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
#: Sides that are tried, smallest first, by the number of an image's dimensions.
_SIDES = {1: (32, 64, 224, 299), 2: (32, 64, 224, 299), 3: (16, 32, 112)}
#: Frames of a video, at most. Chosen, not measured.
_FRAMES = 16


def bound_inputs(example_inputs: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example inputs as positional arguments, and those that ``forward`` takes by name only.

    A tuple or list holds the arguments in order, a dict holds them by name; anything else is the only
    argument. Raises `InputError` for a dict that fits ``forward`` only in part.
    """
    if isinstance(example_inputs, (tuple, list)):
        needed = [p for p in parameters_of(model) if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
        if needed:
            raise InputError(
                f"{type(model).__name__}.forward takes {', '.join(p.name for p in needed)} by name only: pass the "
                "example inputs as a dict by the names of its arguments"
            )
        return tuple(example_inputs), {}
    if not isinstance(example_inputs, Mapping):
        return (example_inputs,), {}
    signature = inspect.signature(model.forward)
    by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    only_by_name = all(parameter.kind in by_name for parameter in signature.parameters.values())
    if not only_by_name and not signature.parameters.keys() & example_inputs.keys():
        return (example_inputs,), {}  # a model whose one argument is a dict
    try:
        bound = signature.bind(**example_inputs)
    except TypeError as error:
        raise InputError(
            f"the example inputs {', '.join(map(str, example_inputs))} do not fit "
            f"{type(model).__name__}.forward{signature}: {error}. In batches, labels go beside the inputs: "
            "(inputs, labels)"
        ) from error
    named = bound.kwargs
    bound.apply_defaults()
    names = list(signature.parameters)
    last = max(
        (names.index(name) for name in example_inputs if name in names and name not in named), default=-1
    )
    return bound.args[: last + 1], named


def as_inputs(example_inputs: Any, model: nn.Module) -> tuple[Any, ...]:
    """Return the example inputs as a tuple of positional arguments; `InputError` if that is impossible."""
    args, named = bound_inputs(example_inputs, model)
    if named:
        raise InputError(
            f"{type(model).__name__}.forward takes {', '.join(named)} by name only; give example_inputs"
        )
    return args


def first_convolution(model: nn.Module) -> Convolution | None:
    """Return the convolution that is defined first: it says how many channels and dimensions an image has."""
    return next((m for m in model.modules() if isinstance(m, Convolution)), None)


def image_shape(first: Convolution, side: int, batch: int = 2) -> tuple[int, ...]:
    """Return the shape of images of this side for a model whose first convolution this is."""
    rank = len(first.kernel_size)
    spatial = (min(_FRAMES, side), side, side) if rank == 3 else (side,) * rank
    return (batch, first.in_channels, *spatial)


def shape_of_text(model: nn.Module, text: str, batch: int = 2) -> tuple[int, ...]:
    """Return the input shape of a text: "160" (a side), "3x160x160" (without the batch), or a whole shape.

    Raises `InputError` for other texts, and for a side if the model has no convolution.
    """
    try:
        sizes = tuple(int(part) for part in text.lower().replace(",", "x").split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"input size {text!r} is none: give a side (224), or sizes like 3x224x224")
    first = first_convolution(model)
    if len(sizes) == 1:
        if first is None:
            raise InputError(f"the model has no convolution; give its whole input shape, not {text!r}")
        return image_shape(first, sizes[0], batch)
    rank = len(first.kernel_size) if first is not None else 0
    return (batch, *sizes) if len(sizes) == rank + 1 else sizes


def default_inputs(model: nn.Module, sides: Sequence[int] = ()) -> tuple[Any, ...]:
    """Guess inputs the model accepts: its `example_input_array`, timm's `pretrained_cfg`, or an image.

    The image has the first convolution's input channels, batch 2, and the first side of ``sides`` and of 32, 64, 224
    and 299 pixels that the model takes. Raises `InputError` if none fits.
    """
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return as_inputs(example, model)
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return (torch.randn(2, *config["input_size"]),)
    first, reasons = first_convolution(model), list[str]()
    for side in () if first is None else (*sides, *_SIDES[len(first.kernel_size)]):
        assert first is not None
        image = torch.randn(image_shape(first, side)).to(first.weight)
        try:
            run_eager(model, (image,))
        except Exception as error:
            reasons.append(f"{tuple(image.shape)}: {first_line(error)}")
        else:
            return (image,)
    raise InputError(
        f"no example input fits {type(model).__name__} ({'; '.join(reasons) or 'no convolution was found'}). "
        "Pass one: prepare(model, example_inputs=torch.randn(...))."
    )
