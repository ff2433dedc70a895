"""Inputs that a model is run on: those that were given, in the order of its forward, or an image that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.errors import InputError
from smcp_fx.tracing.example_runs import first_line, run_eager

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
#: Images that are tried, by the number of their spatial dimensions: small ones are quick, the usual ones are what the
#: known architectures were made for.
_SMALL = {
    1: ((32,), (64,), (224,), (299,)),
    2: ((32, 32), (64, 64), (224, 224), (299, 299)),
    3: ((16, 16, 16), (32, 32, 32), (112, 112, 112)),
}
_USUAL = {1: ((224,),), 2: ((224, 224), (299, 299)), 3: ((16, 112, 112),)}


def as_inputs(example_inputs: Any, model: nn.Module) -> tuple[Any, ...]:
    """Return the example inputs as a tuple of positional arguments.

    A tuple or list is taken as they are, a dict of the names of ``forward``'s arguments in their order, anything else
    as the one argument. Raises `InputError` for a dict that fits ``forward`` only in part.
    """
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs)
    if not isinstance(example_inputs, Mapping):
        return (example_inputs,)
    signature = inspect.signature(model.forward)
    if not signature.parameters.keys() & example_inputs.keys():
        return (example_inputs,)  # a model whose one argument is a dict
    try:
        bound = signature.bind(**example_inputs)
    except TypeError as error:
        raise InputError(
            f"the example inputs {', '.join(map(str, example_inputs))} do not fit "
            f"{type(model).__name__}.forward{signature}: {error}"
        ) from error
    bound.apply_defaults()
    if bound.kwargs:
        raise InputError(
            f"{type(model).__name__}.forward takes {', '.join(bound.kwargs)} by name only, which cannot be traced: "
            "wrap the model in one that takes them by position"
        )
    names = list(signature.parameters)
    last = max(names.index(name) for name in example_inputs)
    return bound.args[: last + 1]


def first_convolution(model: nn.Module) -> Convolution | None:
    """Return the convolution that stands first in the model."""
    return next((part for part in model.modules() if isinstance(part, Convolution)), None)


def default_inputs(model: nn.Module, *, usual: bool = False) -> tuple[Any, ...]:
    """Guess inputs the model accepts: its `example_input_array`, timm's `pretrained_cfg`, or two images.

    The images have the first convolution's input channels and are the smallest that the model takes, of 32 to 299
    pixels a side; with ``usual``, sizes that networks are made for come first. Raises `InputError` when none fits.
    """
    given = getattr(model, "example_input_array", None)
    if given is not None:
        return as_inputs(given, model)
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return (torch.randn(2, *config["input_size"]),)
    first = first_convolution(model)
    reasons = ["no convolution was found"] if first is None else []
    for image in () if first is None else _images(first, usual):
        try:
            run_eager(model, (image,))
        except Exception as error:  # whatever the model says to an image that is too small
            reasons.append(f"{tuple(image.shape)}: {first_line(error)}")
        else:
            return (image,)
    raise InputError(
        f"no example input fits {type(model).__name__} ({'; '.join(reasons)}). "
        "Pass one: prepare(model, example_inputs=torch.randn(...))."
    )


def _images(first: Convolution, usual: bool) -> Iterator[Tensor]:
    rank = len(first.kernel_size)
    for sides in (*(_USUAL[rank] if usual else ()), *_SMALL[rank]):
        yield torch.randn(2, first.in_channels, *sides).to(first.weight)
