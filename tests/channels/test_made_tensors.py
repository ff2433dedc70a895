"""Tensors computed from sizes alone (position encodings, coordinates) lose the channels of what they meet."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from models import random_masks
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx


def sines(h: Tensor) -> Tensor:
    """[1, C, H, W], as detectors with transformers make it."""
    rows = torch.ones(h.shape[-2:], dtype=h.dtype).cumsum(0)
    steps = 100.0 ** (2 * (torch.arange(h.shape[1]) // 2) / h.shape[1])
    angles = rows[:, :, None] / steps
    return (
        torch.stack((angles[..., 0::2].sin(), angles[..., 1::2].cos()), 3).flatten(2).permute(2, 0, 1)[None]
    )


def table(h: Tensor) -> Tensor:
    """[C, 1, 1], written piece by piece."""
    found = torch.zeros(12)
    found[0::2] = torch.arange(6.0).sin()
    found[1::2] = torch.arange(6.0).cos()
    return found[:, None, None]


def places(h: Tensor) -> Tensor:
    """[N, 2, H, W]"""
    across = torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype).expand(h.shape[0], 1, h.shape[-2], -1)
    return torch.cat((across, across.flip(-1)), 1)


def mesh(h: Tensor) -> tuple[Tensor, ...]:
    """Two of [H, W]"""
    return torch.meshgrid(*(torch.arange(n, dtype=h.dtype) for n in h.shape[2:]), indexing="ij")


def typed(h: Tensor) -> Tensor:
    """[C, H, W], of the type and on the device of features."""
    like = h.new_zeros(1, dtype=torch.float32)
    rows = torch.meshgrid(*(torch.arange(n).type_as(like) for n in h.shape[2:]), indexing="ij")[0]
    angles = (torch.arange(h.shape[1]).type_as(like) / h.shape[1])[:, None] @ rows.reshape(1, -1)
    return angles.cos().reshape(h.shape[1], *h.shape[2:]).type_as(h)


def read_twice(s: nn.Module, h: Tensor) -> Tensor:
    """By features, and by what is computed from sizes, too."""
    found = sines(h)
    return (h + found) * (found.cumsum(1) + found.flip(1)).sin()


def copy_written(s: nn.Module, h: Tensor) -> Tensor:
    """A tensor computed from sizes and a copy that is written into, both read by features."""
    found = sines(h)
    return h + found + found.clone().mul_(2)


def before_a_write(s: nn.Module, h: Tensor) -> Tensor:
    """What is written into was made from sizes of features that had met such a tensor."""
    rows, _ = torch.meshgrid(*(torch.arange(n, dtype=h.dtype) for n in h.shape[1::2]), indexing="ij")
    h = h + rows[:, None]
    across = torch.arange(h.shape[-1], dtype=h.dtype)
    across.chunk(2)[0].mul_(2)
    return h * across


BETWEEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "added": lambda s, h: h + sines(h),
    "multiplied, in another place": lambda s, h: s.last(h * sines(h)).relu() + sines(h),
    "a factor of each": lambda s, h: h * torch.linspace(0.5, 1.0, 12, dtype=h.dtype)[:, None, None],
    "channels last": lambda s, h: (h.permute(0, 2, 3, 1) * torch.arange(12)).permute(0, 3, 1, 2),
    "beside": lambda s, h: s.wide(torch.cat((h, places(h)), 1)),
    "read twice": read_twice,
    "of a mesh grid": lambda s, h: h + mesh(h)[0] * mesh(h)[1],
    "typed as features": lambda s, h: h + typed(h),
    "an outer product": lambda s, h: (
        h + s.rates.outer(torch.arange(h.shape[-1], dtype=h.dtype)).sin()[:, None]
    ),
    "before a write": before_a_write,
    "before features are written": lambda s, h: s.last(h + sines(h)).relu_(),
    "by the image's size": lambda s, h: h + torch.arange(h.shape[-1], dtype=h.dtype),
}
#: Channels stay where a tensor that is computed from sizes is written into.
WRITTEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "written": lambda s, h: h + table(h),
    "a copy is written": copy_written,
}


class Net(nn.Module):
    """Two convolutions, and between them what the test says."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Conv2d(3, 12, 3), nn.Conv2d(14, 12, 1), nn.Conv2d(12, 12, 1)
        self.head, self.between = nn.Conv2d(12, 4, 1), between
        self.register_buffer("rates", torch.linspace(0.1, 1.0, 12))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W]."""
        return self.head(self.between(self, self.first(x).relu()).relu())


@pytest.mark.parametrize("name", [*BETWEEN, *WRITTEN])
def test_masked_is_sliced_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    model, image = (
        Net((BETWEEN | WRITTEN)[name]).double().eval(),
        torch.randn(2, 3, 10, 10, dtype=torch.float64),
    )
    prepared = smcp_fx.prepare(model, image)
    assert name in WRITTEN or prepared.channels.free_share == 1.0
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for size in (10, 14):
        images = torch.randn(3, 3, size, size, dtype=torch.float64)
        assert_close(sliced(images), prepared(images), "slicing", f"{name}, {size}")
    assert_close(copy.deepcopy(sliced)(image), prepared(image), "slicing", name)
