"""Small networks that take some of the channels: slices, single ones, look-ups, slices that are written into."""

from __future__ import annotations

from typing import Any

import torch
from models import Net, awkward, between, conv
from torch import Tensor, nn


@awkward(1.0)
def slice_with_step() -> nn.Module:
    return between(lambda s, h: h[:, 1::3], 8, 3)


@awkward(1.0)
def slice_from_the_end() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.left(h) + s.right(h[:, -3:]) + s.third(h.narrow(1, 1, 4))  # type: ignore[no-any-return]

    return Net(wiring, stem=conv(3, 8), left=conv(8, 4), right=conv(3, 4), third=conv(4, 4))


@awkward(7 / 8)
def index_by_number() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.out(h) + h[:, 3].unsqueeze(1)  # type: ignore[no-any-return]

    return Net(wiring, stem=conv(3, 8), out=conv(8, 4))


@awkward(7 / 8)
def select_by_number() -> nn.Module:
    def wiring(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.out(h) + h.select(1, 3).unsqueeze(1)  # type: ignore[no-any-return]

    return Net(wiring, stem=conv(3, 8), out=conv(8, 4))


@awkward(1.0)
def index_by_list() -> nn.Module:
    return between(lambda s, h: h[:, [6, 0, 3, 3]], 8, 4)


@awkward(0.0)
def index_by_computed_places() -> nn.Module:
    """Pinned: places that follow from the input's size; along the rows they would not matter."""
    return between(lambda s, h: h[:, torch.arange(h.shape[2] // 2) * 2], 8, 4)


@awkward(1.0)
def rows_by_computed_places() -> nn.Module:
    return between(lambda s, h: h[:, :, torch.arange(h.shape[2]) // 2])


@awkward(1.0)
def slice_written_in_place() -> nn.Module:
    """A plain slice stays a view, so that what is written into it reaches the tensor it is a view of."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h[:, :4].mul_(2.0)
        return h

    return between(wiring)


@awkward(0.0)
def strided_slice_written_in_place() -> nn.Module:
    """Pinned: index_select, which would have to replace the view, copies."""

    def wiring(s: Any, h: Tensor) -> Tensor:
        h[:, ::2].mul_(2.0)
        return h

    return between(wiring)
