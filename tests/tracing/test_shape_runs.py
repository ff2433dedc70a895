"""Runs from shapes alone refuse what the network itself does not take, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from smcp_fx.tracing.shape_runs import ShapeRuns
from smcp_fx.tracing.tracer import trace


class Net(nn.Module):
    """A convolution, and what ``then`` makes of it with another layer."""

    def __init__(self, then: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module) -> None:
        super().__init__()
        self.stem, self.then, self.layer = nn.Conv2d(3, 8, 3, padding=1), then, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer, self.stem(x).relu())


def runs_of(net: nn.Module) -> ShapeRuns:
    traced = trace(net.train(), (torch.randn(2, 3, 8, 8),))
    return ShapeRuns(traced.module, traced.values, traced.inputs)


def halves(layer: nn.Module, x: Tensor) -> Tensor:
    tokens = layer(x.flatten(2).transpose(1, 2).to(x.device))
    return (tokens @ tokens.transpose(1, 2)).softmax(-1).roll(1, 1) + torch.zeros(1, device=tokens.device)


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (2, 3, 12, 10)])
def test_sizes_that_are_taken_are_not_refused(shape: tuple[int, ...]) -> None:
    net = Net(halves, nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Dropout()))
    assert not runs_of(net).refuse((torch.randn(shape),))


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
    assert runs_of(net).refuse((torch.randn(2, 3, 12, 12),))


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
    assert not runs_of(net).refuse((torch.randn(2, 3, 12, 12),))
