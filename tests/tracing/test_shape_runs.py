"""Runs from shapes alone say what the network itself says, or that they cannot tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smcp_fx.tracing.example_runs import record
from smcp_fx.tracing.shape_runs import ShapeRuns, UntoldError
from smcp_fx.tracing.tracer import trace


class Net(nn.Module):
    """A convolution, and what ``then`` makes of it with another layer."""

    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.then, self.layer = nn.Conv2d(3, 8, 3, padding=1), then, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer, self.stem(x).relu())


def runs_of(net: nn.Module) -> tuple[ShapeRuns, torch.fx.GraphModule]:
    traced = trace(net.train(), (torch.randn(2, 3, 8, 8),))
    return ShapeRuns(traced.module, traced.values, traced.given), traced.module


def halves(layer: nn.Module, x: Tensor) -> Tensor:
    tokens = layer(x.flatten(2).transpose(1, 2).to(x.device))
    return (tokens @ tokens.transpose(1, 2)).softmax(-1).roll(1, 1) + torch.zeros(1, device=tokens.device)


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (2, 3, 12, 10)])
def test_values_are_those_of_the_network(shape: tuple[int, ...]) -> None:
    shapes, module = runs_of(Net(halves, nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Dropout())))
    found, recorded = shapes.values((torch.randn(shape),)), record(module, (torch.randn(shape),))[1]
    assert found is not None
    assert {name: repr(value) for name, value in found.items()} == {n: repr(v) for n, v in recorded.items()}


def fixed(layer: nn.Module, x: Tensor) -> Tensor:
    if x.shape[2] > 10:
        x = x * 2
    return layer(x)


@pytest.mark.parametrize(
    "net",
    [
        Net(fixed, nn.Conv2d(8, 4, 1)),
        Net(lambda layer, x: layer(x.flatten(2)), nn.Linear(64, 4)),
        Net(lambda layer, x: layer(x.flatten(2).transpose(1, 2).unsqueeze(3)), nn.Conv2d(64, 4, 1)),
        Net(lambda layer, x: layer(x.flatten(1)), nn.BatchNorm1d(512)),
    ],
    ids=["assumption", "linear", "convolution", "batch norm"],
)
def test_sizes_that_are_not_taken_are_told(net: nn.Module) -> None:
    assert runs_of(net)[0].values((torch.randn(2, 3, 12, 12),)) is None


@pytest.mark.parametrize(
    "net",
    [
        Net(lambda layer, x: x.mean(3) + layer(torch.arange(x.shape[2])).sum(), nn.Embedding(8, 4)),
        Net(lambda layer, x: layer(x.flatten(2).transpose(1, 2).unsqueeze(3)), nn.ConvTranspose2d(64, 4, 1)),
        Net(lambda layer, x: layer(x.flatten(2))[0], nn.GRU(64, 4)),
    ],
    ids=["places", "not checked", "unknown"],
)
def test_the_network_is_asked_where_shapes_do_not_tell(net: nn.Module) -> None:
    with pytest.raises(UntoldError):
        runs_of(net)[0].values((torch.randn(2, 3, 12, 12),))
