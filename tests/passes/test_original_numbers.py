"""Numbers made of channel counts: computed anew on fewer channels, and never left stale."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

import smcp_fx
from smcp_fx.errors import PassError
from smcp_fx.passes.original_numbers import recomputed


def number(function: Any, *, recorded: Any, of: Any) -> Any:
    """``function`` of one operand that was something else when the graph was recorded."""
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("x"),))
    return recomputed(node, recorded, {"x": of})


def test_a_number_is_that_of_the_channels_kept() -> None:
    assert number(operator.neg, recorded=-8, of=5) == -5
    assert number(torch.numel, recorded=16, of=torch.zeros(2, 3, dtype=torch.int64)) == 6


def test_what_asks_a_tensor_that_is_gone_stays() -> None:
    assert number(operator.neg, recorded=-8, of=None) == -8


def test_a_number_that_cannot_be_computed_is_refused() -> None:
    with pytest.raises(PassError, match=r"'reciprocal'.*was 1 and cannot be computed.*ZeroDivisionError"):
        number(reciprocal, recorded=1, of=0)


def reciprocal(n: int) -> int:
    return 1 // n


def test_what_is_no_number_stays_where_it_cannot_be_told() -> None:
    def grad_of(x: Any) -> Any:
        raise RuntimeError("labels have none")

    assert number(grad_of, recorded=torch.float32, of=3) is torch.float32


class ScaledByWidth(nn.Module):
    """Divides by its channel count and multiplies by its batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y * y.shape[1] ** -0.5 / y.shape[0])


def test_a_channel_count_in_arithmetic_keeps_its_value_and_the_batch_stays_open() -> None:
    torch.manual_seed(0)
    model = ScaledByWidth().eval()
    prepared = smcp_fx.prepare(model, torch.randn(2, 3, 4, 4), config=smcp_fx.PruningConfig(multiple=1))
    (group,) = (group for group in prepared.channels.groups if group.free)
    prepared.set_masks({group.name: torch.arange(8) < 5})
    smaller = smcp_fx.convert(prepared)
    assert smaller.get_submodule("first").out_channels == 5
    x = torch.randn(3, 3, 5, 5)
    y = model.first(x)[:, :5]
    expected = torch.conv2d(y * 8**-0.5 / 3, model.last.weight[:, :5], model.last.bias)
    torch.testing.assert_close(smaller(x), expected)
