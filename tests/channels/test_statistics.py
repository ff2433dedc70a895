"""What mixes channels: which channels it frees, and which it keeps, and why."""

from __future__ import annotations

import models_statistics
import pytest
import torch
from models import Net, conv
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import smcp_fx
from smcp_fx.channels import ChannelGraph


def graph_of(model: nn.Module) -> ChannelGraph:
    config = smcp_fx.PruningConfig(multiple=1)
    return smcp_fx.prepare(model.eval(), torch.randn(2, 3, 8, 8), config=config).channels


def test_channels_that_only_a_statistic_reads_stay() -> None:
    """No weight behind them tells what they are worth."""
    model = Net(lambda s, x: s.out(x) * s.stem(x).mean(1, keepdim=True), stem=conv(3, 8), out=conv(3, 4))
    assert graph_of(model)["stem"].pinned == ("no layer reads it, but 'mean', which is made of all channels",)


@pytest.mark.parametrize(
    ("groups", "channels", "units"), [(1, 16, 16), (2, 16, 8), (4, 16, 4), (8, 16, 8), (4, 8, 4), (4, 64, 16)]
)
def test_units_of_a_group_norm(groups: int, channels: int, units: int) -> None:
    """Whole groups where these are many and small; one channel of each where they are few and large."""
    model = nn.Sequential(conv(3, channels), nn.GroupNorm(groups, channels), conv(channels, 2))
    group = graph_of(model)["0"]
    assert group.free and group.size == units


def test_products_that_sum_over_channels_cost_what_is_left_of_these() -> None:
    """Held against torch's own counter, on the sliced network."""
    model = models_statistics.similarity_of_positions()
    image = torch.randn(1, 3, 8, 8)
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks({"stem": torch.arange(8) < 3})
    told = prepared.plan.flops.cost({"stem": 3})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        smcp_fx.convert(prepared, check=False).eval()(image)
    assert told == counter.get_total_flops() / 2
