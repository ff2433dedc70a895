"""What mixes channels: which channels it frees, and which it keeps, and why."""

from __future__ import annotations

from collections.abc import Callable

import models_broadcasts
import models_statistics
import models_windows
import pytest
import torch
from models import Net, check_slicing, conv
from models_products import TOKENS, attention_of_one_head, attention_of_torch_with_one_head
from tolerances import assert_close
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import smcp_fx
from smcp_fx.channels import ChannelGraph


def graph_of(model: nn.Module) -> ChannelGraph:
    config = smcp_fx.PruningConfig(multiple=1)
    return smcp_fx.prepare(model.eval(), torch.randn(2, 3, 8, 8), config=config).channels


def test_channels_that_only_a_statistic_reads_stay() -> None:
    """Neither a weight behind them nor the gradient of their mask tells what they are worth."""
    model = Net(lambda s, x: s.out(x) * s.stem(x).amax(1, keepdim=True), stem=conv(3, 8), out=conv(3, 4))
    assert graph_of(model)["stem"].pinned == ("no layer reads it, but 'amax', which is made of all channels",)


@pytest.mark.parametrize("statistic", [torch.sum, torch.mean, torch.std], ids=["sum", "mean", "std"])
def test_channels_whose_mask_takes_gradients_may_go(statistic: Callable[..., Tensor]) -> None:
    model = Net(
        lambda s, x: s.out(x) * statistic(s.stem(x), 1, keepdim=True), stem=conv(3, 8), out=conv(3, 4)
    )
    assert check_slicing(model, (torch.randn(2, 3, 8, 8),), seeds=(0, 1)).channels["stem"].free


@pytest.mark.parametrize("made", [attention_of_one_head, attention_of_torch_with_one_head])
def test_queries_and_keys_of_one_head_go_together(made: Callable[[], nn.Module]) -> None:
    config = smcp_fx.PruningConfig(multiple=1)
    group = smcp_fx.prepare(made(), torch.randn(TOKENS), config=config).channels["q"]
    assert group.free and group.size == 8
    assert group.producers == ("q", "k") and not group.consumers


def test_positions_with_biases_are_no_channels() -> None:
    """There are more of them than channels of a head; the values' channels go all the same."""
    model = models_broadcasts.biases_of_more_positions_than_channels().eval()
    config = smcp_fx.PruningConfig(multiple=1)
    values = smcp_fx.prepare(model, torch.randn(2, 3, 3, 3), config=config).channels["v"]
    assert values.free and values.consumers == ("out",)


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


def test_batch_norms_over_channels_gather_what_they_will_when_sliced() -> None:
    """In training, by the batch and in their running statistics; and when these are estimated again."""
    image = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    prepared = check_slicing(models_windows.attention_to_pairs_of_dimensions(), (image,))
    sliced = smcp_fx.convert(prepared)
    outputs = [model.train()(image) for model in (prepared, sliced)]
    assert_close(outputs[1], outputs[0], "slicing")
    statistics = {name: tensor for name, tensor in sliced.named_buffers() if "running" in name}
    assert len(statistics) == 4
    for name, tensor in statistics.items():
        assert_close(tensor, prepared.get_buffer(name), "slicing", name)
    for model in (prepared, sliced):
        smcp_fx.recalibrate(model, [image, 2 * image])
    for name, tensor in statistics.items():
        assert_close(tensor, prepared.get_buffer(name), "slicing", name)
