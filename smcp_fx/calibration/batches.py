"""The forms that a batch of calibration data may take, and running a model on one.

A batch is a tensor, a dict of keyword inputs, or a pair ``(inputs, labels)`` from a data loader. The inputs
of a pair are a tensor, a dict, or a tuple of positional inputs; its labels may be None. A list or tuple of
one element holds the inputs alone. A model that takes one list, named tuple or dict gets the inputs as such.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from smcp_fx.errors import InputError, SmcpError, first_line
from smcp_fx.regions import Joined, joined_inputs
from smcp_fx.tracing.call_forms import parameters_of
from smcp_fx.tracing.example_runs import run_eager

#: Most bytes of batches, or of values computed from them, held at a time. Chosen, not measured.
MEMORY = 2 * 2**30


@dataclass(frozen=True)
class Batch:
    """Inputs as a model is called with them, and labels or None; ``number`` counts from 1."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any

    @property
    def images(self) -> int:
        """The length of the first tensor among the inputs."""
        tensors = (t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor))
        first = next(tensors, None)
        return first.shape[0] if first is not None and first.dim() else 1

    @property
    def nbytes(self) -> int:
        """The bytes that its tensors take."""
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(self._parts()) if isinstance(leaf, Tensor))

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on ``device``."""
        return Batch(self.number, *pytree.tree_map(lambda v: _moved(v, device), self._parts()))

    def for_model(self, model: nn.Module) -> Batch:
        """Return the batch as ``forward`` takes it: as one list or dict, if one argument holds all inputs."""
        parameters = parameters_of(model)
        kinds = {parameter.kind for parameter in parameters}
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if self.kwargs:
            names = {p.name for p in parameters} & self.kwargs.keys()
            fits = names or inspect.Parameter.VAR_KEYWORD in kinds or not places
            return self if fits else replace(self, args=(self.kwargs,), kwargs={})
        if len(self.args) < 2 or inspect.Parameter.VAR_POSITIONAL in kinds or not places:
            return self
        fits = len(self.args) <= len(places)
        if (
            fits
            and places[1].default is not inspect.Parameter.empty
            and not isinstance(model, fx.GraphModule)
        ):
            fits = _runs(model, self.args)  # the second may be an option, the first a list of inputs
        whole = self.args if hasattr(self.args, "_fields") else [*self.args]
        return self if fits else replace(self, args=(whole,))

    def _parts(self) -> tuple[Any, ...]:
        return self.args, self.kwargs, self.labels

    def __str__(self) -> str:
        shapes = pytree.tree_map(lambda v: tuple(v.shape) if isinstance(v, Tensor) else v, self._parts()[:2])
        words = [str(shape) for shape in shapes[0]] + [f"{name}={shape}" for name, shape in shapes[1].items()]
        return f"batch {self.number} (inputs of shape {', '.join(words)})"


def each_batch(batches: Any) -> Iterator[Batch]:
    """Iterate over batches once. A tensor or a dict counts as one batch; a `Batch` stays as it is.

    Raises `InputError` for anything else, and for batches without a length (iterators aside) of more than 2
    GiB: they may never end.
    """
    if isinstance(batches, (Tensor, dict)):
        batches = [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
        raise InputError(
            "batches must be a tensor, or an iterable (a list, a data loader) of tensors, dicts of keyword inputs, "
            f"or (inputs, labels), not {_told(batches)}"
        )
    unmeasured = not isinstance(batches, Iterator) and _length(batches) is None
    number = size = 0
    for number, item in enumerate(batches, 1):
        batch = item if isinstance(item, Batch) else _batch(number, item)
        size += batch.nbytes
        if unmeasured and size > MEMORY:
            raise InputError(
                f"the batches have no length, and the first {number} hold more than {MEMORY / 2**30:g} GiB: if they "
                "never end, give some of them (itertools.islice); if they do, give the loader a __len__"
            )
        yield batch
    if not number:
        raise InputError("there are no batches: an iterator that has been used up, or an empty list?")


def again(batches: Any) -> Any:
    """Return the batches in a form that can be iterated over more than once.

    Reads an iterator, such as a generator, into a list; raises `InputError` if that takes more than 2 GiB.
    """
    if not isinstance(batches, Iterator):
        return batches
    kept, size = [], 0
    for item in batches:
        kept.append(item)
        size += sum(t.nbytes for t in pytree.tree_leaves(item) if isinstance(t, Tensor))
        if size > MEMORY:
            raise InputError(
                f"the batches come from an iterator that runs once, and the first {len(kept)} hold more than "
                f"{MEMORY / 2**30:g} GiB: give a data loader, which can be run again, or fewer batches"
            )
    return kept


def number_of(batches: Any) -> int:
    """Return the number of batches; iterates over them only if they have no length."""
    if isinstance(batches, (Tensor, dict)):
        return 1
    length = _length(batches)  # a loader of an iterable data set has none
    return sum(1 for _ in each_batch(batches)) if length is None else max(length, 1)


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def run_batch(model: nn.Module, batch: Batch) -> Any:
    """Call the model; raises `InputError`, naming the batch, if the model does not take it."""
    try:
        batch = batch.for_model(model)
        return model(*batch.args, **batch.kwargs)
    except (SmcpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise refused(model, batch, error) from error


def entering(model: nn.Module, joined: Joined | None, batch: Batch) -> Batch:
    """Return the batch as the model's graph takes it: with regions, the tensors that Python passes them."""
    batch = batch.for_model(model)
    if joined is None:
        return batch
    try:
        return Batch(batch.number, joined_inputs(model, joined, batch.args, batch.kwargs), {}, None)
    except (SmcpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise refused(model, batch, error) from error


def refused(model: nn.Module, batch: Batch, error: Exception) -> InputError:
    """Return the error to raise if a model does not take a batch."""
    return InputError(f"{batch} does not go through {type(model).__name__}: {first_line(error)}")


def require_finite_gradients(batch: Batch, values: Iterable[Tensor]) -> None:
    """Raise `InputError`, naming the batch, if tensors computed from its gradients are not finite."""
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise InputError(
            f"{batch} gives gradients that are not finite: look for NaN in the activations, and for square roots, "
            "norms or logarithms of zero in the model and in loss= (labels that are the network's own outputs give "
            "such zeros: leave them away)"
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first tensor; the CPU if it has none."""
    first = next((t for tensors in (model.parameters(), model.buffers()) for t in tensors), None)
    return torch.device("cpu") if first is None else first.device


def _batch(number: int, item: Any) -> Batch:
    inputs, labels = item, None
    if isinstance(item, (list, tuple)):
        if len(item) not in (1, 2):
            raise InputError(
                f"batch {number} is a {type(item).__name__} of {len(item)} elements; a batch is a tensor, a dict of "
                "keyword inputs, or (inputs, labels). Write several inputs as ((first, second), labels), labels None "
                "where there are none"
            )
        inputs, labels = (*item, None)[:2]
    if isinstance(inputs, dict):
        args, kwargs = (), {str(name): value for name, value in inputs.items()}
    else:
        several = tuple(inputs) if isinstance(inputs, list) else inputs  # a named tuple stays one
        args, kwargs = several if isinstance(several, tuple) else (several,), {}
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise InputError(
            f"the inputs of batch {number} hold no tensor, but {_told(inputs)}: give tensors (torch.as_tensor)"
        )
    for tensor in tensors:
        if not tensor.numel():
            raise InputError(f"batch {number} holds an empty tensor, of shape {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"the inputs of batch {number} are not all finite numbers (NaN or infinity)")
    return Batch(number, args, kwargs, labels)


def _runs(model: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        run_eager(model, args)
    except Exception:  # a model may raise anything for inputs that it was not made for
        return False
    return True


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _told(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
