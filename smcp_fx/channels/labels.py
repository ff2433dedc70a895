"""Label tensors: which channel each element of a tensor belongs to.

A label tensor has the shape of the tensor it describes and int64 elements. A positive label names a channel
slot written by a producer; a negative one names a source whose elements always stay. A dimension along
which the labels do not change is kept at stride 0, so that it costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor


def compact(labels: Tensor) -> Tensor:
    """Return the same labels with every uniform dimension at stride 0."""
    if labels.numel() == 0:
        return labels
    core = narrow_uniform(labels)  # first, so that as little as possible is compared below
    for dim in range(core.dim()) if core.numel() > 1 else ():
        if core.shape[dim] > 1:
            first = core.narrow(dim, 0, 1)
            if torch.equal(core, first.expand_as(core)):
                core = first
    return core.expand(labels.shape)


def varied_dims(labels: Tensor) -> list[int]:
    """Return the dimensions along which compacted labels change."""
    return [d for d in range(labels.dim()) if labels.shape[d] > 1 and labels.stride(d) != 0]


def narrow_uniform(labels: Tensor, keep: Sequence[int] = ()) -> Tensor:
    """Return the labels with each uniform dimension at size 1, the dimensions in ``keep`` left alone."""
    strides = labels.stride()
    if 0 not in strides:
        return labels
    sizes = [
        min(size, 1) if stride == 0 and dim not in keep else size
        for dim, (size, stride) in enumerate(zip(labels.shape, strides, strict=True))
    ]
    return labels.as_strided(sizes, strides, labels.storage_offset())


def at_first(labels: Tensor, keep: Collection[int]) -> Tensor:
    """Return the labels at index 0 of every dimension that is not in ``keep``, which then has size 1."""
    sizes = [size if dim in keep else min(size, 1) for dim, size in enumerate(labels.shape)]
    return labels.as_strided(sizes, labels.stride(), labels.storage_offset())


def line_along(labels: Tensor, dim: int) -> Tensor:
    """Return the labels along one dimension, at index 0 of the others, 1-D."""
    return at_first(labels, [dim]).reshape(-1)


def reshaped(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """The labels, reshaped. Uniform dimensions at either end are left out, because `reshape` would copy them."""
    varied = varied_dims(labels)
    if not varied or not labels.numel():
        return uniform(int(labels.flatten()[0]), shape) if labels.numel() else labels.reshape(shape)
    behind = [math.prod(shape[place:]) for place in range(len(shape) + 1)]  # elements from each dimension on
    whole, rest = math.prod(labels.shape[varied[0] :]), math.prod(labels.shape[varied[-1] + 1 :])
    first, start = (behind.index(whole), varied[0]) if whole in behind else (0, 0)
    last, end = (behind.index(rest), varied[-1] + 1) if rest in behind else (len(shape), labels.dim())
    for dim in (*range(start), *range(end, labels.dim())):
        labels = labels.narrow(dim, 0, 1)
    ones = [1] * first, [1] * (len(shape) - last)
    return labels.reshape(*ones[0], *shape[first:last], *ones[1]).expand(tuple(shape))


def paired(left: Tensor, right: Tensor) -> tuple[Tensor, list[tuple[Tensor, int]]]:
    """Pairs [2, n] of different labels at equal places, after broadcasting; and labels opposite fixed ones.

    The labels opposite a fixed one come with the index of its reason.
    """
    a, b = (t.reshape(-1) for t in torch.broadcast_tensors(left, right))  # type: ignore[no-untyped-call]
    pins = []
    for one, other in ((a, b), (b, a)):
        met = (one > 0) & (other < 0)
        for source in torch.unique(other[met]).tolist() if bool(met.any()) else ():
            pins.append((torch.unique(one[met & (other == source)]), -1 - source))
    both = (a > 0) & (b > 0) & (a != b)
    return torch.stack([a[both], b[both]]), pins


def uniform(label: int, shape: Sequence[int]) -> Tensor:
    """Return labels of the shape, all of them ``label``, in the memory of one."""
    return torch.full((1,) * len(shape), label, dtype=torch.int64).expand(tuple(shape))


def along(labels: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Return labels of the shape that follow the 1-D ``labels`` along ``dim``."""
    view = [1] * len(shape)
    view[dim] = labels.numel()
    return labels.reshape(view).expand(tuple(shape))


def place(labels: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
    """1-D channel labels laid along ``dim`` of a tensor of the shape."""
    return compact(along(labels, shape, dim % len(shape)))


def stays(labels: Tensor) -> bool:
    """Whether a single fixed source wrote the whole tensor."""
    return labels.numel() > 0 and not varied_dims(labels) and int(labels.flatten()[0]) < 0
