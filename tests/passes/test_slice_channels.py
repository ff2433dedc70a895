"""Slicing changes sizes and no node, and refuses what it is not for."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Residual, chain
from pass_models import kinds, traced
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import PassError
from smcp_fx.passes.insert_soft_masks import InsertSoftMasks
from smcp_fx.passes.slice_channels import SliceChannels


def test_slicing_adds_and_removes_no_node() -> None:
    module, channels = traced(Residual())
    before = kinds(module)
    keep = torch.ones(channels.free_units.numel(), dtype=torch.bool)
    keep[channels["conv1"].units[5:]] = False
    assert not SliceChannels(channels, torch.ones_like(keep))(copy.deepcopy(module)).modified
    result = SliceChannels(channels, keep)(module)
    assert kinds(module) == before
    assert tuple(module.get_parameter("conv1.weight").shape) == (5, 16, 3, 3)
    assert tuple(module.get_parameter("conv2.weight").shape) == (16, 5, 3, 3)
    assert tuple(module.get_parameter("conv3.weight").shape) == (24, 16, 3, 3)
    assert any("(24, 16, 3, 3) -> (5, 16, 3, 3)" in line for line in result.report)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert getattr(module.bn1, name).shape == (5,)


def test_slicing_refuses_masks_in_the_graph_and_empty_groups() -> None:
    module, channels = traced(chain(8, 12))
    nothing = torch.zeros(channels.free_units.numel(), dtype=torch.bool)
    with pytest.raises(PassError, match="keep nothing"):
        SliceChannels(channels, nothing)(module)
    InsertSoftMasks(channels)(module)
    with pytest.raises(PassError, match="FoldMasks"):
        SliceChannels(channels, ~nothing)(module)


def test_modules_that_are_read_but_not_called_get_their_new_sizes() -> None:
    """A convolution's subclass is traced through; where it is a region of its own, it is there after slicing."""

    class Shift(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(3, 3, 1)
            self.requires_grad_(False)

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift, self.out = Shift(), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.shift(x)) if float(x.sum()) < 1e9 else x  # type: ignore[no-any-return]

    image = torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(Branching().eval(), image)
    prepared.set_masks(
        {g.name: torch.tensor([True, False, True]) for g in prepared.channels.groups if g.free}
    )
    sliced = smcp_fx.convert(prepared)
    assert sliced.get_submodule("shift").out_channels == 2
    assert_close(sliced(image), prepared(image), "slicing")
