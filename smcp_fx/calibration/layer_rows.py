"""Convolutions and linears as products of rows with a matrix, for least-squares regression.

A row holds what one output position reads: for a convolution of ``groups`` groups, [groups, inputs of a group times
kernel elements]. A transposed convolution is the plain one of its zero-stuffed input with the kernel flipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

#: The most numbers that the rows of one chunk may hold (64 MiB in float64).
_CHUNK = 2**23
#: Output positions that a layer is looked at by, if there are as many, for each of its inputs: so many up to a number
#: of positions, and at least so many. Docs: experiments.md.
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
        """Return what uses of one weight must share to form one regression."""
        return self.rank, self.groups, self.transposed, tuple(self.weight.shape)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as [groups, inputs, outputs], in double precision."""
        found = weight.detach().double()
        if not self.transposed:
            return found.reshape(self.groups, -1, found[0].numel()).transpose(1, 2)
        found = found.flip(tuple(range(2, found.dim())))
        found = found.reshape(self.groups, -1, *found.shape[1:])
        return found.movedim(2, -1).flatten(1, -2)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`, in the weight's shape and type."""
        if not self.transposed:
            return matrix.transpose(1, 2).reshape(self.weight.shape).to(self.weight)
        inputs, kernel = self.weight.shape[0] // self.groups, self.weight.shape[2:]
        found = matrix.reshape(self.groups, inputs, *kernel, -1).movedim(-1, 2).flatten(0, 1)
        return found.flip(tuple(range(2, found.dim()))).to(self.weight)

    def positions(self, y: Tensor) -> tuple[int, int]:
        """Return an output's images (length of the first dimension) and the positions of each."""
        y = self._batched(y)
        channels = y.shape[1] if self.rank else y.shape[-1]
        return y.shape[0], y.numel() // channels // y.shape[0]

    def along_outputs(self, value: Tensor) -> Tensor:
        """Return [outputs] so that it broadcasts against the layer's output."""
        return value.reshape(-1, *(1,) * self.rank)

    def squares(self, y: Tensor) -> Tensor:
        """Return squares of an output-shaped tensor, summed over images and positions, [groups, outputs] float64."""
        y = self._batched(y)
        last = y.movedim(1, -1) if self.rank else y
        return last.flatten(0, -2).double().square().sum(0).reshape(self.groups, -1)

    def rows(
        self, x: Tensor, y: Tensor, chosen: Tensor, images: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and outputs at the chosen positions of each image, or of some ``images``, a chunk at a time.

        Chunks are [images, positions, groups, inputs] and [images, positions, groups, outputs].
        """
        x, y = self._batched(x), self._batched(y)
        if images is not None:
            x, y = x.index_select(0, images), y.index_select(0, images)
        columns = self.matrix(self.weight).shape[:2].numel()
        at_once = max(1, _CHUNK // max(1, columns * chosen.numel()))
        for some in range(0, x.shape[0] if chosen.numel() else 0, at_once):
            part, outputs = x[some : some + at_once], y[some : some + at_once]
            if self.rank:
                inputs = self._read(part, outputs.shape[2:], chosen)
                outputs = outputs.flatten(2).transpose(1, 2)[:, chosen]
            else:
                inputs, outputs = (
                    value.reshape(value.shape[0], -1, value.shape[-1]).index_select(1, chosen)
                    for value in (part, outputs)
                )
            yield (
                inputs.reshape(*inputs.shape[:2], self.groups, -1),
                outputs.reshape(*outputs.shape[:2], self.groups, -1),
            )

    def _read(self, x: Tensor, lengths: torch.Size, chosen: Tensor) -> Tensor:
        """Return what the outputs at chosen positions read, [images, positions, channels, kernel]."""
        x, stride = self._padded(x, lengths)
        flat = torch.zeros((chosen.numel(), 1), dtype=torch.int64, device=x.device)
        for dim, place in enumerate(torch.unravel_index(chosen, lengths)):
            taps = torch.arange(self.weight.shape[2 + dim], device=x.device) * self.dilation[dim]
            reads = place.unsqueeze(1) * stride[dim] + taps
            flat = (flat.unsqueeze(2) * x.shape[2 + dim] + reads.unsqueeze(1)).flatten(1)
        found = x.flatten(2).transpose(1, 2)[:, flat.flatten()]  # several times as fast as `index_select`
        return found.reshape(len(x), *flat.shape, -1).transpose(2, 3)

    def _batched(self, value: Tensor) -> Tensor:
        """Add a first dimension of images where it is missing."""
        return (
            value.unsqueeze(0) if value.dim() == self.rank + 1 and (self.rank or value.dim() == 1) else value
        )

    def _padded(self, x: Tensor, lengths: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
        """Return the padded input, and the stride with which the kernel goes over it."""
        kernel, pads, stride = self.weight.shape[2:], list(self.pads), self.stride
        if self.transposed:
            x = _stuffed(x, stride)
            stride = (1,) * self.rank
            for dim in range(self.rank):  # the output's size decides what is cut or added at the end
                reach = self.dilation[dim] * (kernel[dim] - 1)
                left = reach - self.pads[2 * dim]
                place = 2 * (self.rank - 1 - dim)
                pads[place], pads[place + 1] = left, lengths[dim] + reach - left - x.shape[2 + dim]
        return (F.pad(x, pads, self.mode) if any(pads) else x), stride


def rows_for(inputs: int) -> int:
    """Return how many rows a fit of so many inputs an output takes; what it adds to the error is inputs / rows."""
    return max(_LEAST * inputs, min(_FULL * inputs, _ENOUGH))


def some_of(positions: int, number: int, generator: torch.Generator) -> Tensor:
    """Return so many of the positions, drawn; all of them where there are no more."""
    if positions <= number:
        return torch.arange(positions)
    return torch.randperm(positions, generator=generator)[:number]


def _stuffed(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Insert stride - 1 zeros between neighbours."""
    lengths = [(length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)]
    found = x.new_zeros(*x.shape[:2], *lengths)
    place: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    found[place] = x
    return found
