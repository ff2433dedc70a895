"""Limits on the widths of named layers: read, met by every solve, told, and refused where they cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smcp_fx
from smcp_fx.config import MethodConfig
from smcp_fx.errors import InfeasibleBudgetError, InputError


class Net(nn.Module):
    """`stem` and `b.1` share a group; a depthwise layer carries it; a GRU's units are a group."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 64, 3, padding=1)
        self.a = nn.Sequential(nn.Conv1d(64, 64, 1), nn.ReLU(), nn.Conv1d(64, 32, 3))
        self.b = nn.Sequential(nn.Conv1d(64, 64, 3, padding=1, groups=64), nn.Conv1d(64, 64, 1))
        self.cell = nn.GRU(32, 48, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.a(x + self.b(x))
        found: torch.Tensor = self.head(self.cell(x.transpose(1, 2))[0][:, -1])
        return found


def solved(*widths: str, target: float = 0.4, **options: Any) -> dict[str, int]:
    """Output channels by layer, where a solve keeps these limits."""
    torch.manual_seed(0)
    config = MethodConfig(widths=widths, **options)
    prepared = smcp_fx.prepare(Net(), torch.randn(2, 3, 9), target=target, config=config, check=False)
    prepared.train()(torch.randn(4, 3, 9)).square().sum().backward()
    prepared.pruner.step()
    prepared.pruner.solve()
    text = prepared.summary()
    assert all(text.count(limit) for limit in widths)
    return {path: outs for path, (_, outs) in smcp_fx.convert(prepared, check=False).widths().items()}


@pytest.mark.parametrize("options", [{}, {"mask": "permanent"}, {"allocation": "paper"}, {"multiple": 1}])
def test_a_solve_meets_every_limit(options: dict[str, Any]) -> None:
    found = solved("stem >= 48", "a.0 = 50%", "a.2 <= 25%", "cell >= 75%", target=0.5, **options)
    assert found["stem"] == found["b.1"] >= 48  # one group
    assert found["a.0"] == 32
    assert found["a.2"] <= 8
    assert found["cell"] >= 36


def test_a_pattern_and_a_module_name_the_layers_in_them() -> None:
    found = solved("a.* >= 75%", "b >= 40", target=0.6)
    assert found["a.0"] >= 48
    assert found["a.2"] >= 24
    assert found["stem"] >= 40
    assert min(solved("* >= 30", target=0.6).values()) == 5  # the head stays whole


def test_a_share_between_two_permitted_counts_is_the_nearest() -> None:
    assert solved("a.0 = 45%")["a.0"] == 32
    assert solved("a.0 = 45%", multiple=1)["a.0"] == 29


def test_with_layer_pruning_a_layer_with_a_least_width_stays() -> None:
    config = smcp_fx.PruningConfig(layer_pruning=True, widths=("b.1 >= 8", "a.0 <= 50%"))
    prepared = smcp_fx.prepare(Net(), torch.randn(2, 3, 9), config=config, check=False)
    assert 0 not in prepared.channels["stem"].choices
    assert prepared.channels["a.0"].choices[-1] == 32


def test_limits_in_the_way_of_the_target_are_named() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"Limits on widths: '\* >= 90%'"):
        solved("* >= 90%", target=0.3)


@pytest.mark.parametrize(
    ("widths", "told"),
    [
        (("c.* >= 8",), r"'c.\* >= 8' names no convolution or linear"),
        (("a.* >= 50%", "a.0 <= 25%"), r"'a.\* >= 50%' and 'a.0 <= 25%' leave group 'a.0' no count"),
        (("a.0 <= 4",), "leave group 'a.0' no count.*multiples of 8"),
        (("head = 60%",), "'head = 60%' names layers whose outputs must all stay: of 'head', reaches"),
        (("a.0 >= 65",), "more than the 64 channels of 'a.0'"),
        (("a.0 > 8",), "'a.0 > 8' is no limit; give"),
        (("a.0 >= 0.5",), "'a.0 >= 0.5' is no limit"),
        (("a.0 >= 120%",), "'a.0 >= 120%' is no limit"),
        ("a.0 >= 8", "widths must be a tuple of limits"),
    ],
)
def test_limits_that_cannot_hold_are_errors_that_name_them(widths: tuple[str, ...], told: str) -> None:
    with pytest.raises(InputError, match=told):
        solved(*widths) if isinstance(widths, tuple) else smcp_fx.PruningConfig(widths=widths)


def test_patterns_exclude_layers() -> None:
    config = smcp_fx.PruningConfig(exclude=("a.?",))
    channels = smcp_fx.prepare(Net(), torch.randn(2, 3, 9), config=config, check=False).channels
    assert channels["a.0"].pinned == channels["a.2"].pinned == ("excluded by the user ('a.?')",)
    assert channels["stem"].free
