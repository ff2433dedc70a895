"""Decides what the tensors of a model's output are: scores of classes, yes or no, or values.

A shape is not enough: [32, 10] may be ten classes or ten coordinates. The first of these decides: the user
(``outputs=``), labels, measurement (probabilities sum to one), hints of the model (``num_classes``, a field
called ``logits``). Without any, an output counts as values. The user is told of an inferred reading.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from smcp_fx.errors import InputError

Kind = Literal["classes", "binary", "values"]
#: One kind for the whole output, or by the name of each tensor that counts.
Kinds = str | Mapping[str, str]

#: Fields of outputs that are no answers, if there are other fields.
_BESIDE = re.compile(r"loss|hidden|attention|past|cache|aux")
_SCORES = re.compile(r"logits|cls|class")
#: How far a sum of probabilities may be from one: by type; for other types, and for labels.
_SUM = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_SUM = 3e-2
_LEAST_PROBABILITY = 1e-8
#: Messages list at most this many names.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Reading:
    """How one tensor is read: as class scores along ``dim``, as the logits of yes or no, or as values.

    ``probabilities``: it holds these instead of scores. ``why``: the evidence; "" without any. ``given``: the
    user or labels decided. ``shape``: that of the tensor.
    """

    kind: Kind
    shape: tuple[int, ...]
    dim: int = 1
    probabilities: bool = False
    why: str = ""
    given: bool = False

    def scores(self, tensor: Tensor) -> Tensor:
        """The tensor as real numbers to compute with: classes' scores in the last dimension, or logits, or values."""
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
        if self.probabilities and not _is_share(tensor):
            what, instead = ("classes", "scores") if self.kind == "classes" else ("yes or no", "logits")
            raise InputError(
                f"the output {list(self.shape)} was from 0 to 1 at first, and taken for probabilities of {what}; now "
                f"it is not, so it holds {instead}: begin with a larger batch, or give your own loss"
            )
        if self.kind == "classes":
            tensor = tensor.movedim(self.dim, -1)
            return tensor.clamp_min(_LEAST_PROBABILITY).log() if self.probabilities else tensor
        return tensor.clamp(_LEAST_PROBABILITY, 1 - 1e-7).logit() if self.probabilities else tensor

    def __str__(self) -> str:
        scores = "probabilities" if self.probabilities else "scores"
        meaning = {
            "classes": f"{scores} of classes along dimension {self.dim}",
            "binary": f"{'probabilities' if self.probabilities else 'logits'} of yes or no",
            "values": "values, whose squared error counts relative to their variance",
        }[self.kind]
        return f"{list(self.shape)}: {meaning}" + f" ({self.why})" * bool(self.why)


def named_tensors(outputs: Any) -> dict[str, Tensor]:
    """The real or complex tensors, neither empty nor scalar, in nested tuples, lists, dicts and objects.

    Each is keyed by the path to it; "" is the output itself.
    """
    return {
        name: tensor
        for name, tensor in tensors_in(outputs)
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dim() and tensor.numel()
    }


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists, dicts and objects, each with the path to it behind ``name``."""
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        parts = value
    elif isinstance(value, (list, tuple)):
        parts = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif not isinstance(value, type):
        parts = getattr(value, "__dict__", {})
    for key, part in parts.items():
        yield from tensors_in(part, f"{name}.{key}" if name else str(key))


def read_outputs(
    outputs: Any, named: Kinds | None = None, labels: Any = None, model: Any = None
) -> dict[str, Reading]:
    """Read each tensor that counts in a model's output.

    Args:
        outputs: what the model returned.
        named: the kind of the output, or of each tensor that counts by name; "classes:2" names the dimension.
        labels: those of the batch, or None.
        model: its ``num_classes``, ``num_labels`` and (from transformers) ``config`` are hints.

    Raises `InputError` for outputs without such tensors, for names and kinds that do not fit, and for labels that fit
    no output.
    """
    tensors = named_tensors(outputs)
    if not tensors:
        raise InputError(
            f"the output is a {type(outputs).__name__} that holds no tensor of numbers: give loss=, a function of "
            "(outputs, labels)"
        )
    if isinstance(named, Mapping):
        if unknown := set(named) - set(tensors):
            raise InputError(f"outputs= names {_told(unknown)}; the model's output has {_told(tensors)}")
        return {name: _named(tensors[name], kind) for name, kind in named.items()}
    answers = {name: t for name, t in tensors.items() if not _BESIDE.search(name)} or tensors
    if named is not None:
        return {name: _named(tensor, named) for name, tensor in answers.items()}
    if labels is not None:
        own_labels = labels_of(answers, labels)
        return {name: _by_label(name, tensor, own_labels[name]) for name, tensor in answers.items()}
    return {name: _measured(tensor) or _said(name, tensor, model) for name, tensor in answers.items()}


def labels_of(names: Collection[str], labels: Any) -> dict[str, Tensor]:
    """The label of each output; raises `InputError` if labels are not arranged like the outputs."""
    tensors = dict(tensors_in(labels))
    if len(names) == len(tensors) == 1:
        return dict(zip(names, tensors.values(), strict=True))
    if not set(names) <= set(tensors):
        shown = _told(tensors) if tensors else f"a {type(labels).__name__} without tensors"
        raise InputError(
            f"the labels are {shown}, the outputs {_told(names)}: give labels as tensors, arranged like the outputs; "
            "or loss=, a function of (outputs, labels); or leave the labels away"
        )
    return tensors


def told(readings: Mapping[str, Reading], outputs: Any) -> str:
    """A sentence that says how each tensor is read, and which tensors are left out."""
    taken = "; ".join(f"{repr(name) + ' ' if name else ''}{reading}" for name, reading in readings.items())
    rest = named_tensors(outputs).keys() - readings.keys()
    return f"output {taken}" + f"; left out: {_told(rest)}" * bool(rest)


def spread(tensor: Tensor) -> Tensor:
    """The mean variance of a tensor's elements over the first dimension (images); over all, for one image.

    At least 1e-4 of their mean square, so that outputs that hardly change do not get huge weights.
    """
    tensor = tensor.detach()
    variance = tensor.var(0, correction=0).mean() if tensor.shape[0] > 1 else tensor.var(correction=0)
    return torch.maximum(variance, 1e-4 * tensor.square().mean())


def _named(tensor: Tensor, text: Any) -> Reading:
    kind, _, dim = str(text).partition(":")
    shape = tuple(tensor.shape)
    if kind not in get_args(Kind) or (dim and (kind != "classes" or not dim.lstrip("-").isdigit())):
        raise InputError(
            "outputs= must be 'classes', 'binary' or 'values' ('classes:2' for classes along dimension 2), or a dict "
            f"of such kinds by name, not {text!r}"
        )
    if kind == "binary":
        return Reading("binary", shape, probabilities=_is_share(tensor), given=True)
    if kind == "values":
        return Reading("values", shape, given=True)
    measured = _measured(tensor)
    along = int(dim) if dim else measured.dim if measured is not None else _class_dim(tensor)
    if not 1 - tensor.dim() <= along < tensor.dim() or not along or tensor.shape[along] < 2:
        raise InputError(
            f"outputs= names classes along dimension {along}, but the output is of shape {list(shape)}"
            + ": one number is 'binary' or 'values'" * (tensor.shape[-1] == 1)
        )
    along %= tensor.dim()
    probable = measured is not None and measured.dim == along and measured.probabilities
    return Reading("classes", shape, along, probable, given=True)


def _class_dim(tensor: Tensor) -> int:
    """The usual dimension of the classes: [b, c], [b, t, c], [b, c, h, w]."""
    return min(1, tensor.dim() - 1) if tensor.dim() != 3 else 2


def _measured(tensor: Tensor) -> Reading | None:
    """Recognise probabilities, or their logarithms, that sum to one along exactly one dimension."""
    if tensor.is_complex() or tensor.dim() < 2:
        return None
    positive, negative = bool((tensor >= 0).all()), bool((tensor <= 0).all())
    if positive == negative:
        return None
    values = tensor.float() if positive else tensor.float().exp()
    tolerance = _SUM.get(tensor.dtype, HALF_SUM)
    dims = [d for d in range(1, tensor.dim()) if tensor.shape[d] > 1]
    sum_to_one = [d for d in dims if bool(((values.sum(d) - 1).abs() < tolerance).all())]
    if len(sum_to_one) != 1:
        return None
    return Reading("classes", tuple(tensor.shape), sum_to_one[0], positive, "they sum to one")


def _said(name: str, tensor: Tensor, model: Any) -> Reading:
    """Read an output by the model's hints: its config, its number of classes, the output's name."""
    shape, config = tuple(tensor.shape), getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return Reading("values", shape, why="the model's config says regression")
    if problem == "multi_label_classification":
        return Reading("binary", shape, why="the model's config says several labels")
    dims = [_class_dim(tensor), *range(1, tensor.dim())]
    for holder, attribute in ((model, "num_classes"), (model, "num_labels"), (config, "num_labels")):
        number = getattr(holder, attribute, None)
        if isinstance(number, int) and number > 1:
            for dim in dims:
                if tensor.shape[dim] == number:
                    return Reading("classes", shape, dim, why=f"the model's {attribute} is {number}")
    if _SCORES.search(name.rpartition(".")[2]) and tensor.dim() > 1 and tensor.shape[dims[0]] > 1:
        return Reading("classes", shape, dims[0], why="by its name")
    return Reading("values", shape)


def _by_label(name: str, tensor: Tensor, label: Tensor) -> Reading:
    """Read by labels: integers are classes; numbers of its shape are probabilities, yes or no, or values."""
    shape, measured = tuple(tensor.shape), _measured(tensor)
    probable = measured is not None and measured.probabilities
    for dim in [d for d in (_class_dim(tensor), *range(1, tensor.dim())) if d and tensor.shape[d] > 1]:
        if numbers_fit(label, shape, dim):
            same = measured is not None and measured.dim == dim
            return Reading("classes", shape, dim, probable and same, "labels are whole numbers", True)
    if answers_fit(label, shape):
        truth = bool(((label == 0) | (label == 1)).all())
        soft = _measured(label.float()) if label.dim() > 1 and label.shape == tensor.shape else None
        if soft is not None and soft.probabilities:
            same = measured is not None and measured.dim == soft.dim
            return Reading("classes", shape, soft.dim, probable and same, "labels sum to one", True)
        if truth:
            return Reading("binary", shape, probabilities=_is_share(tensor), why="labels are 0 and 1")
        return Reading("values", shape, why="labels are numbers of its shape, and are not used")
    raise InputError(misfit(name, shape, label))


def numbers_fit(label: Tensor, shape: tuple[int, ...], dim: int) -> bool:
    """Whether labels are numbers of classes, one for each position of an output with classes along ``dim``."""
    whole = not label.is_floating_point() and not label.is_complex() and label.dtype != torch.bool
    return whole and tuple(label.shape) in (_without(shape, dim), _without(shape, dim, 1))


def answers_fit(label: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether there is a label for each number of an output, up to dimensions of one."""
    return _squeezed(label.shape) == _squeezed(shape)


def misfit(name: str, shape: tuple[int, ...], label: Tensor) -> str:
    """The message for labels that do not fit an output."""
    return (
        f"the labels, {label.dtype} of shape {list(label.shape)}, do not fit the output"
        f"{' ' + repr(name) if name else ''} of shape {list(shape)}: give loss=, a function of (outputs, labels), or "
        "leave the labels away"
    )


def _is_share(tensor: Tensor) -> bool:
    """Is every element from zero to one, up to rounding? (NaN is reported elsewhere.)"""
    slack = _SUM[torch.float32]
    return not bool(((tensor < -slack) | (tensor > 1 + slack)).any())


def _without(shape: tuple[int, ...], dim: int, *instead: int) -> tuple[int, ...]:
    return (*shape[:dim], *instead, *shape[dim + 1 :])


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1], *(size for size in shape[1:] if size != 1))


def _told(names: Collection[str]) -> str:
    shown = [repr(name) if name else "one tensor" for name in sorted(names)]
    return ", ".join(shown[:_SHOWN] + [f"{len(shown) - _SHOWN} more"] * (len(shown) > _SHOWN)) or "none"
