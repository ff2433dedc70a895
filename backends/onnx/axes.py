"""The axes of a file's inputs that stay open, by name, and other sizes at which to check the file."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smcp_fx.backends.checking import eval_mode, flatten_outputs
from smcp_fx.errors import InputError

#: For each input, the names of its open axes by their places; axes of one name have one size.
Axes = tuple[dict[int, str], ...]
#: As users write them: by the input's name or place, the names of axes by their places, or the places alone.
GivenAxes = Mapping[str | int, Mapping[int, str] | Sequence[int]]

_OF_IMAGES = {4: ("height", "width"), 5: ("depth", "height", "width")}
#: Factors for the sizes of the first two open axes, tried until the model runs: networks ask for multiples.
_FACTORS = ((1, 2, 3, 4), (1, 2, 3, 2), (2, 1, 3, 2), (2, 1, 2, 1))


def batch_axes(inputs: Sequence[Tensor]) -> Axes:
    """Return the first axis of every input, as "batch"."""
    for place, tensor in enumerate(inputs):
        if tensor.dim() == 0:
            raise InputError(f"input {place} has no batch axis; pass dynamic_batch=False")
    return tuple({0: "batch"} for _ in inputs)


def image_axes(model: nn.Module, inputs: Sequence[Tensor]) -> Axes | None:
    """Return the batch and the sides of images or volumes if an output's sizes follow them; else None."""
    sides: dict[str, int] = {}
    opened = batch_axes(inputs)
    for place, tensor in enumerate(inputs):
        for axis, name in enumerate(_OF_IMAGES.get(tensor.dim(), ()), 2):
            if sides.setdefault(name, tensor.shape[axis]) != tensor.shape[axis]:
                name = f"{name}_{place}"
            opened[place][axis] = name
    if not sides:
        return None
    open_sides = tuple({a: n for a, n in axes.items() if a} for axes in opened)
    with torch.no_grad(), eval_mode(model):
        other = next(other_sizes(model, inputs, open_sides), None)
        if other is None:
            return None
        shapes = [[out.shape for out in flatten_outputs(model(*_copies(given)))] for given in (inputs, other)]
    batch = inputs[0].shape[:1]
    if any(a[:1] == batch != b[:1] for a, b in zip(*shapes, strict=False)):
        return None  # a reshape to [-1, ...] took more positions for more samples
    return opened if shapes[0] != shapes[1] else None


def given_axes(
    given: GivenAxes,
    model: nn.Module,
    inputs: Sequence[Tensor],
    names: Sequence[str] | None,
    outputs: Sequence[str] | None,
) -> Axes:
    """Return a user's axes; `InputError` if one does not exist. Axes of outputs follow from the inputs'."""
    ports = [str(name) for name in names or inspect.signature(model.forward).parameters][: len(inputs)]
    opened: Axes = tuple({} for _ in inputs)
    sizes: dict[str, tuple[int, str]] = {}
    if not isinstance(given, Mapping):
        raise InputError(
            f"dynamic_axes must be a dict by input, as {{'x': {{0: 'batch', 2: 'height'}}}}, not {given!r}"
        )
    for key, axes in given.items():
        place = ports.index(key) if key in ports else key
        if key in (outputs or ()):
            continue
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(inputs):
            raise InputError(
                f"dynamic_axes: the model has no input {key!r}; give "
                f"{', '.join(map(repr, ports))}, or a place from 0 to {len(inputs) - 1} (axes of outputs follow; "
                "output_names= names these)"
            )
        if isinstance(axes, (str, int)) or not isinstance(axes, (Mapping, Sequence)):
            raise InputError(
                f"dynamic_axes[{key!r}] must be axes with names, as {{0: 'batch'}}, not {axes!r}"
            )
        named = axes if isinstance(axes, Mapping) else {axis: f"{key}_{axis}" for axis in axes}
        shape = inputs[place].shape
        for axis, name in named.items():
            if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
                raise InputError(
                    f"dynamic_axes[{key!r}]: the input, of shape {tuple(shape)}, has no axis {axis!r}"
                )
            if not isinstance(name, str) or not name.isidentifier():
                raise InputError(
                    f"dynamic_axes[{key!r}][{axis}]: {name!r} is no name; give a word, as 'height'"
                )
            size, where = sizes.setdefault(name, (shape[axis], f"{key!r}"))
            if size != shape[axis]:
                raise InputError(
                    f"dynamic_axes: {name!r} is {size} in {where} and {shape[axis]} in {key!r}: axes of one name "
                    "have one size; give them two names"
                )
            if opened[place].setdefault(axis % len(shape), name) != name:
                raise InputError(
                    f"dynamic_axes[{key!r}][{axis}] names an axis again that is {opened[place][axis % len(shape)]!r}"
                )
    return opened


def other_sizes(model: nn.Module, inputs: Sequence[Tensor], axes: Axes) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs that the model takes, with other sizes on all open axes; the batch is 3, or 2."""
    sizes = {
        name: tensor.shape[a] for tensor, own in zip(inputs, axes, strict=True) for a, name in own.items()
    }
    batch = {own[0] for own in axes if 0 in own}
    for attempt in range(len(_FACTORS) + 1):
        changed: dict[str, int] = {}
        for index, (name, size) in enumerate(sorted(sizes.items())):
            odd = index % 2 * 2
            if attempt == len(_FACTORS):
                changed[name] = size + 1
            elif name in batch and attempt < 2:
                changed[name] = 2 if size == 3 else 3
            else:
                up, down = _FACTORS[attempt][odd : odd + 2]
                changed[name] = max(size * up // down, 1) if size * up // down != size else size + 1
        other = resized(inputs, axes, changed)
        try:
            # A graph module prints its code if it fails.
            with torch.no_grad(), eval_mode(model), contextlib.redirect_stderr(io.StringIO()):
                model(*_copies(other))
        except Exception:  # a model may raise anything at sizes that it was not made for
            continue
        yield other


def resized(inputs: Sequence[Tensor], axes: Axes, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Return the inputs with these sizes on their open axes: cut off, or repeated from the start."""
    tensors = []
    for tensor, own in zip(inputs, axes, strict=True):
        for axis, name in own.items():
            if name in sizes:
                places = torch.arange(sizes[name], device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, places)
        tensors.append(tensor)
    return tuple(tensors)


def _copies(inputs: Sequence[Tensor]) -> Any:
    """Return copies, as a forward may write into its inputs."""
    return [tensor.clone() for tensor in inputs]
