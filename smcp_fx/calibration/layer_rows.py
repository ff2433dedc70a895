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
#: Least output positions that a layer is looked at by, if there are as many: this number, and this many times its
#: inputs. Four times as many changed nothing (docs: experiments.md).
LEAST_ROWS, ROWS_PER_INPUT = 20_000, 8


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
        """Return an output's images (length of the first dimension) and total output positions."""
        y = self._batched(y)
        channels = y.shape[1] if self.rank else y.shape[-1]
        return y.shape[0], y.numel() // channels

    def along_outputs(self, value: Tensor) -> Tensor:
        """Return [outputs] so that it broadcasts against the layer's output."""
        return value.reshape(-1, *(1,) * self.rank)

    def squares(self, y: Tensor) -> Tensor:
        """Return squares of an output-shaped tensor, summed over images and positions, [groups, outputs] float64."""
        y = self._batched(y)
        last = y.movedim(1, -1) if self.rank else y
        return last.flatten(0, -2).double().square().sum(0).reshape(self.groups, -1)

    def rows(self, x: Tensor, y: Tensor, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the chosen positions (flat indices) of the layer's input and output, a chunk at a time.

        Chunks are [positions, groups, inputs] and [positions, groups, outputs].
        """
        x, y = self._batched(x), self._batched(y)
        if self.rank:
            windows = self._windows(x, y.shape[2:])
            y = y.movedim(1, -1)
        else:
            windows = x
        lengths = y.shape[:-1]
        columns = self.matrix(self.weight).shape[:2].numel()
        for part in torch.split(chosen, max(1, _CHUNK // columns)) if chosen.numel() else ():
            first, *others = torch.unravel_index(part, lengths)
            place: tuple[Any, ...] = (first, slice(None), *others) if self.rank else (first, *others)
            inputs = windows[place]
            outputs = y[(first, *others)]
            yield (
                inputs.reshape(part.numel(), self.groups, -1),
                outputs.reshape(part.numel(), self.groups, -1),
            )

    def _batched(self, value: Tensor) -> Tensor:
        """Add a first dimension of images where it is missing."""
        return (
            value.unsqueeze(0) if value.dim() == self.rank + 1 and (self.rank or value.dim() == 1) else value
        )

    def _windows(self, x: Tensor, lengths: torch.Size) -> Tensor:
        """Return a view [images, channels, output positions ..., kernel ...] of the padded input."""
        kernel, pads, stride = self.weight.shape[2:], list(self.pads), self.stride
        if self.transposed:
            x = _stuffed(x, stride)
            stride = (1,) * self.rank
            for dim in range(self.rank):  # the output's size decides what is cut or added at the end
                reach = self.dilation[dim] * (kernel[dim] - 1)
                left = reach - self.pads[2 * dim]
                place = 2 * (self.rank - 1 - dim)
                pads[place], pads[place + 1] = left, lengths[dim] + reach - left - x.shape[2 + dim]
        if any(pads):
            x = F.pad(x, pads, self.mode)
        for dim, (k, s, d) in enumerate(zip(kernel, stride, self.dilation, strict=True)):
            x = x.unfold(2 + dim, d * (k - 1) + 1, s)
        taken: tuple[Any, ...] = (..., *(slice(None, None, d) for d in self.dilation))
        return x[taken]


def _stuffed(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Insert stride - 1 zeros between neighbours."""
    lengths = [(length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)]
    found = x.new_zeros(*x.shape[:2], *lengths)
    place: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    found[place] = x
    return found
