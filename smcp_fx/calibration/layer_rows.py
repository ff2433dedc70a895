"""Convolutions and linears as products of rows with a matrix, for least-squares regression.

A row holds the inputs of one output position: for a convolution, [groups, inputs of a group times kernel
elements]. A transposed convolution counts as a plain one on its zero-stuffed input, with the kernel flipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

#: Most numbers in the rows of one chunk (64 MiB in float64).
_CHUNK = 2**23
#: Output positions that a layer is fitted to, if it has that many: ``_FULL`` for each input, up to
#: ``_ENOUGH`` in all, but at least ``_LEAST`` for each input. Docs: experiments.md.
_FULL, _ENOUGH, _LEAST = 100, 20_000, 8


@dataclass(frozen=True)
class Consumer:
    """A convolution (``rank`` 1 to 3) or linear (0) of a graph, with its parameters."""

    node: fx.Node
    path: str
    input: fx.Node
    weight: nn.Parameter
    bias: nn.Parameter | None
    rank: int
    groups: int = 1
    transposed: bool = False
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()  # as `F.pad` takes them; negative ones cut
    mode: str = "constant"

    @property
    def form(self) -> tuple[Any, ...]:
        """Return the properties that uses of one weight must share to form one regression."""
        return self.rank, self.groups, self.transposed, tuple(self.weight.shape)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as [groups, inputs, outputs], in double precision."""
        w = weight.detach().double()
        if not self.transposed:
            return w.reshape(self.groups, -1, w[0].numel()).transpose(1, 2)
        w = w.flip(tuple(range(2, w.dim())))
        w = w.reshape(self.groups, -1, *w.shape[1:])
        return w.movedim(2, -1).flatten(1, -2)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`, in the weight's shape and type."""
        if not self.transposed:
            return matrix.transpose(1, 2).reshape(self.weight.shape).to(self.weight)
        inputs, kernel = self.weight.shape[0] // self.groups, self.weight.shape[2:]
        w = matrix.reshape(self.groups, inputs, *kernel, -1).movedim(-1, 2).flatten(0, 1)
        return w.flip(tuple(range(2, w.dim()))).to(self.weight)

    def positions(self, y: Tensor) -> tuple[int, int]:
        """Return an output's images (length of the first dimension) and the positions of each."""
        y = self._batched(y)
        channels = y.shape[1] if self.rank else y.shape[-1]
        return y.shape[0], y.numel() // channels // y.shape[0]

    def along_outputs(self, value: Tensor) -> Tensor:
        """Reshape a vector [outputs] to broadcast against the layer's output."""
        return value.reshape(-1, *(1,) * self.rank)

    def squares(self, y: Tensor) -> Tensor:
        """Return squares of an output-shaped tensor, summed over images and positions, [groups, outputs] float64."""
        y = self._batched(y)
        by_channel, along = (y.flatten(2), -1) if self.rank else (y.flatten(0, -2), 0)
        norms: Tensor = torch.linalg.vector_norm(by_channel, dim=along, dtype=torch.float64)
        return norms.square().reshape(-1, y.shape[1 if self.rank else -1]).sum(0).reshape(self.groups, -1)

    def rows(
        self, x: Tensor, y: Tensor, images: Tensor, positions: Tensor, channels: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and outputs of some images at some positions, a chunk of images at a time.

        ``channels``: the layer's outputs among the channels of ``y``, if not all. Indices on the CPU avoid a
        wait. Chunks are [images, positions, groups, inputs] and [images, positions, groups, outputs].
        """
        x, y = self._batched(x), self._batched(y)
        columns = self.matrix(self.weight).shape[:2].numel()
        at_once = max(1, _CHUNK // max(1, columns * positions.numel()))
        if channels is not None:
            channels = channels.to(y.device)
        read = self._reader(x, y.shape[2:], positions) if self.rank else partial(_at, x, positions)
        for start in range(0, images.numel() if positions.numel() else 0, at_once):
            some = images[start : start + at_once]
            inputs, outputs = read(some), _at(y.flatten(2).mT if self.rank else y, positions, some)
            if channels is not None:
                outputs = outputs.index_select(-1, channels)
            yield (
                inputs.reshape(*inputs.shape[:2], self.groups, -1),
                outputs.reshape(*outputs.shape[:2], self.groups, -1),
            )

    def _reader(self, x: Tensor, lengths: torch.Size, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a reader of some images' inputs to positions, [images, positions, channels, kernel]."""
        x, stride, left = self._padded(x, lengths)
        flat = torch.zeros((positions.numel(), 1), dtype=torch.int64)
        inside = torch.ones_like(flat, dtype=torch.bool)
        for dim, place in enumerate(torch.unravel_index(positions, lengths)):
            taps = torch.arange(self.weight.shape[2 + dim]) * self.dilation[dim] - left[dim]
            reads = place.unsqueeze(1) * stride[dim] + taps
            there = (reads >= 0) & (reads < x.shape[2 + dim])
            flat = (flat.unsqueeze(2) * x.shape[2 + dim] + reads.unsqueeze(1)).flatten(1)
            inside = (inside.unsqueeze(2) & there.unsqueeze(1)).flatten(1)
        outside = (~inside).flatten().nonzero().flatten()
        shape, flat = flat.shape, flat.where(inside, 0).flatten()

        def read(images: Tensor) -> Tensor:
            rows = _at(x.flatten(2).mT, flat, images)
            if outside.numel():
                rows.index_fill_(1, outside.to(x.device), 0)
            return rows.reshape(len(images), *shape, -1).transpose(2, 3)

        return read

    def _batched(self, value: Tensor) -> Tensor:
        """Add a first dimension of images where it is missing."""
        return (
            value.unsqueeze(0) if value.dim() == self.rank + 1 and (self.rank or value.dim() == 1) else value
        )

    def _padded(self, x: Tensor, lengths: torch.Size) -> tuple[Tensor, tuple[int, ...], list[int]]:
        """Return the input, the kernel's stride over it, and the zeros that would pad its start."""
        kernel, stride, left = self.weight.shape[2:], self.stride, list(self.pads[::2][::-1])
        if self.transposed:
            x = _stuffed(x, stride)
            stride = (1,) * self.rank
            left = [
                d * (k - 1) - pad for d, k, pad in zip(self.dilation, kernel, self.pads[::2], strict=True)
            ]
        if self.mode == "constant":
            return x, stride, left
        return F.pad(x, self.pads, self.mode), stride, [0] * self.rank


def _at(values: Tensor, positions: Tensor, images: Tensor) -> Tensor:
    """Return [images, positions, channels] of values [all images, ..., channels]."""
    values = values.reshape(values.shape[0], -1, values.shape[-1])
    return values[images.unsqueeze(1).to(values.device), positions.to(values.device)]  # copies nothing else


def rows_for(inputs: int) -> int:
    """Return the rows for a fit with this many inputs per output; the fit adds inputs / rows to the error."""
    return max(_LEAST * inputs, min(_FULL * inputs, _ENOUGH))


def some_of(positions: int, number: int, generator: torch.Generator) -> Tensor:
    """Draw this many positions; return all of them if there are no more."""
    if positions <= number:
        return torch.arange(positions)
    return torch.randperm(positions, generator=generator)[:number]


def _stuffed(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Insert stride - 1 zeros between neighbours."""
    lengths = [(length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)]
    stuffed = x.new_zeros(*x.shape[:2], *lengths)
    place: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    stuffed[place] = x
    return stuffed
