"""Modules that are not a model's own: made in forward, kept in lists, with hooks or caches; subclasses of layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Net, between, conv
from torch import Tensor, nn
from tracing_oracle import check_traced

import smcp_fx
from smcp_fx.errors import TraceError

Wiring = Callable[[Any, Tensor], Tensor]


@pytest.mark.parametrize(
    "wiring",
    [
        lambda s, h: nn.ReLU()(h),
        lambda s, h: nn.Sequential(nn.ReLU(), nn.AvgPool2d(2))(h),
        lambda s, h: nn.InstanceNorm2d(h.shape[1])(h),
        lambda s, h: nn.Upsample(size=(h.shape[2] * 2, h.shape[3]), mode="nearest")(h),
        lambda s, h: s.kept[0](h),
    ],
)
def test_modules_made_in_forward_or_kept_in_lists(wiring: Wiring) -> None:
    assert check_traced(between(wiring, kept=[nn.LeakyReLU(0.1)])).channels.free_share == 1.0


def test_a_sequential_of_submodules_is_made_in_forward() -> None:
    """As the encoders of segmentation_models_pytorch up to 0.4 do."""
    model = between(
        lambda s, h: nn.Sequential(s.mid, s.norm, nn.ReLU())(h), mid=conv(8, 8), norm=nn.BatchNorm2d(8)
    )
    prepared = check_traced(model)
    assert prepared.channels.free_share == 1.0 and not prepared.regions


@pytest.mark.parametrize("wiring", [lambda s, h: s.kept[0](h), lambda s, h: nn.Conv2d(8, 8, 1)(h)])
def test_modules_with_weights_outside_the_model_are_refused(wiring: Wiring) -> None:
    model = between(wiring, kept=[nn.Conv2d(8, 8, 1)]).eval()
    with pytest.raises(
        TraceError, match=r"a Conv2d that is called is not a submodule.*nn\.ModuleList"
    ) as told:
        smcp_fx.prepare(model, torch.randn(2, 3, 8, 8))
    assert "Control flow" not in str(told.value)  # advice for other cases


class Shifted(nn.Conv2d):
    """A subclass that is traced through."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=1) + 1


class Normed(nn.BatchNorm2d):
    """A subclass that changes nothing."""


def test_subclasses_of_layers_inside_parts() -> None:
    parts = nn.Sequential(conv(3, 8), Normed(8), Shifted(8, 8, 3), nn.ReLU())
    model = Net(lambda s, x: s.out(s.part(x)) if float(x.sum()) < 1e9 else x, part=parts, out=conv(8, 4))
    prepared = check_traced(model)
    assert prepared.regions == ("part", "out")


class Captured(nn.Module):
    """Takes its features from where a hook keeps them."""

    def __init__(self, value: bool = False) -> None:
        super().__init__()
        self.stem, self.head = (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)),
        )
        self.value = value
        for part in (self.stem, self.stem[1]):
            part.kept = []
            part.register_forward_hook(lambda module, args, output: module.kept.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.stem.kept.clear()
        self.stem[1].kept.clear()
        if self.stem(x).shape[-1] < 4:
            raise ValueError("too small an image")
        if self.value and self.stem.kept[-1].sum() > 1e9:
            raise ValueError("too bright an image")
        return self.head(self.stem.kept[-1] + self.stem[1].kept[-1])


def test_what_a_hook_keeps_for_the_forward_is_traced() -> None:
    model, images = Captured().eval(), torch.randn(2, 3, 12, 12)
    prepared = smcp_fx.prepare(model, images).eval()
    assert not prepared.untraced and prepared.channels.free_share == 1
    torch.testing.assert_close(prepared(images), model(images))


def test_what_a_hook_keeps_for_python_between_regions_is_kept() -> None:
    model, images = Captured(value=True).eval(), torch.randn(2, 3, 12, 12)
    prepared = smcp_fx.prepare(model, images).eval()
    assert prepared.regions
    torch.testing.assert_close(prepared(images), model(images))


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that holds the cached function in a cell."""
    kept = functools.lru_cache(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return kept(*args)

    return call


class Anchored(nn.Module):
    """Keeps what it worked out for one size: under the class's `shape`, and under a size of its own."""

    shape = None
    anchors = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 4))
        self.own, self.offsets, self.scale = None, None, torch.full((1,), 2.0)

    @staticmethod
    @cached
    def steps(height: int, width: int) -> Tensor:
        return torch.arange(height * width, dtype=torch.float32).view(height, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        if self.shape != y.shape:
            self.shape, self.anchors = y.shape, torch.zeros_like(y) + self.steps(*y.shape[2:])
        if self.own != tuple(y.shape[2:]):
            self.own, self.offsets = tuple(y.shape[2:]), self.steps(*y.shape[2:]) * self.scale
        return y + self.anchors + self.offsets


@pytest.mark.parametrize("ran", [False, True])
def test_what_is_kept_for_one_size_is_worked_out_for_each(ran: bool) -> None:
    model, images = Anchored().eval(), torch.randn(2, 3, 12, 12)
    if ran:
        model(images)
    before = model.shape
    prepared = smcp_fx.prepare(model, images).eval()
    assert model.shape == before and prepared.channels.free_share == 1
    for shape in ((2, 3, 12, 12), (3, 3, 8, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), copy.deepcopy(model)(x))
