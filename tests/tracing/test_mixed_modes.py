"""Forwards that decide on the modes of several modules: every combination of modes against the original."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import random_masks, randomise
from test_modes import CONFIG, IMAGE, DropPath, assert_same, outcome
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import AssumptionError
from smcp_fx.tracing import single_trace
from smcp_fx.tracing.tracer import trace


class Normed(nn.Module):
    """Another operation in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        return self.norm(self.conv(x)) if self.training else F.relu(self.conv(x))


class Two(nn.Module):
    """Returns another structure in each mode."""

    def forward(self, x: Tensor) -> Any:
        """[N, C, H, W]."""
        return (x, x.neg()) if self.training else x


class Doubled(nn.Module):
    """Returns twice as many images in training."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        return torch.cat([x, x.neg()]) if self.training else x


class Number(nn.Module):
    """Leaves a number behind that its caller reads."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        self.factor = 2.0 if self.training else 3.0
        return x


class Writes(nn.Module):
    """Writes into what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W]."""
        if self.training:
            x += 1.0
        return x


class Frozen(Normed):
    """Learns in training only."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        with torch.set_grad_enabled(self.training):
            return super().forward(x)


class Nested(nn.Module):
    """Three levels that decide."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.conv = DropPath(), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        return self.drop(self.conv(x)) + x if self.training else self.drop(self.conv(x)) * 2


class Net(nn.Module):
    """Two convolutions, and between them what the test says of the modules."""

    def __init__(self, between: Callable[[Any, Tensor], Any], sub: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.sub, self.other = sub(), nn.Conv2d(8, 8, 3, padding=1)
        self.again = nn.Sequential(self.sub)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        """[N, 3, H, W]."""
        h = self.between(self, self.first(x))
        return tuple(map(self.last, h)) if isinstance(h, tuple) else self.last(h)


def _both(net: Any, h: Tensor) -> Tensor:
    if net.training:
        h = net.sub(h) if net.sub.training else h + 1
    return h


def _either(net: Any, h: Tensor) -> Tensor:
    if net.training or net.sub.training:
        h = net.other(h)
    return net.sub(h * 2) if net.sub.training else h


def _called_in_training(net: Any, h: Tensor) -> Tensor:
    return net.sub(h) if net.training else h


def _dropout(net: Any, h: Tensor) -> Tensor:
    return F.dropout(net.sub(h), 0.5, net.training and net.sub.training)


def _factor(net: Any, h: Tensor) -> Tensor:
    k = 2 if net.training else 3
    h = net.sub(h)
    return h * k if net.sub.training else h


def _called_twice(net: Any, h: Tensor) -> Tensor:
    y = net.sub(h)
    return y + net.sub(y) if net.training else y


def _shared(net: Any, h: Tensor) -> Tensor:
    return net.sub(h) + net.again(h) if net.training else net.again(h)


def _differ(net: Any, h: Tensor) -> Tensor:
    return net.other(net.sub(h)) if net.training != net.sub.training else h


def _returns_early(net: Any, h: Tensor) -> Any:
    h = net.sub(h)
    if not net.training:
        return h
    return (h, net.other(h)) if net.sub.training else h * 2


def _for_their_effect(net: Any, h: Tensor) -> Tensor:
    y = net.sub(h)
    if net.training:
        net.sub(h)
    return h if net.sub.training else y


def _structure(net: Any, h: Tensor) -> Tensor:
    found = net.sub(h)
    return found[0] + found[1] * (2 if net.training else 5) if isinstance(found, tuple) else found


def _doubled(net: Any, h: Tensor) -> Tensor:
    h = net.other(h)
    h = net.sub(h * 2 if net.training else h)
    return h + 1 if net.training else h


def _number(net: Any, h: Tensor) -> Tensor:
    h = net.sub(h)
    return h * net.sub.factor + (1 if net.training else 0)


def _written(net: Any, h: Tensor) -> Tensor:
    h = h + 0
    net.sub(h)
    return h * 2 if net.training else h


def _learns_by_part(net: Any, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(net.sub.training):
        y = net.sub(h)
    return y + net.other(h)


def _learns_by_both(net: Any, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(net.training):
        h = net.other(h)
        with torch.set_grad_enabled(net.sub.training):
            h = h + net.sub(h)
    return h


def _learns_in_eval(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad() if net.sub.training else nullcontext():
        y = net.other(h)
    return net.sub(y) + h


NETS: dict[str, Callable[[], nn.Module]] = {
    **{
        between.__name__: lambda between=between: Net(between, Normed)  # type: ignore[misc]
        for between in (
            _both,
            _either,
            _called_in_training,
            _dropout,
            _factor,
            _called_twice,
            _shared,
            _differ,
            _returns_early,
            _for_their_effect,
            _learns_by_part,
            _learns_by_both,
            _learns_in_eval,
        )
    },
    "drop path of a part called in training": lambda: Net(_called_in_training, DropPath),
    "drop path twice": lambda: Net(_called_twice, DropPath),
    "learns in training": lambda: Net(_called_twice, Frozen),
    "structure": lambda: Net(_structure, Two),
    "another shape": lambda: Net(_doubled, Doubled),
    "number left behind": lambda: Net(_number, Number),
    "written into": lambda: Net(_written, Writes),
    "three levels": lambda: Net(_called_in_training, Nested),
    "three levels, twice": lambda: Net(_called_twice, Nested),
}


@pytest.mark.parametrize("name", NETS)
def test_every_combination_is_the_originals(name: str) -> None:
    """Prepared, converted, and sliced against masked."""
    model = randomise(NETS[name]()).double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    whole = smcp_fx.convert(prepared)
    masked = copy.deepcopy(prepared)
    masked.set_masks(random_masks(masked, 1))
    sliced = smcp_fx.convert(masked)
    other = (nn.Conv2d, nn.Sequential)  # which decide nothing
    deciding = [path for path, part in model.named_modules() if not isinstance(part, other)]
    for modes in itertools.product((False, True), repeat=len(deciding)):
        for one in (model, prepared, whole, masked, sliced):
            known = dict(one.named_modules(remove_duplicate=False))
            for path, mode in zip(deciding, modes, strict=True):
                if path in known:
                    known[path].training = mode
        where = str(dict(zip(deciding, modes, strict=True)))
        assert_same(prepared, model, where)
        assert_same(whole, model, f"converted, {where}")
        if name != "_dropout":  # which draws as many numbers as there are channels
            assert_close(outcome(sliced)[0], outcome(masked)[0], "slicing", where)


class Stage(nn.Module):
    def __init__(self, depth: int, decides: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 1), DropPath()) for _ in range(depth))
        self.decides = decides

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        if self.decides and self.training:
            x = self.conv(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def _traces(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> int:
    made = []
    once = single_trace._trace_once
    monkeypatch.setattr(single_trace, "_trace_once", lambda *a, **k: made.append(a) or once(*a, **k))
    trace(model, (IMAGE,))
    return len(made)


@pytest.mark.parametrize(("decides", "expected"), [(False, 2), (True, 4)])
def test_parts_that_decide_alone_need_no_trace_of_their_own(
    decides: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve drop paths: eval and train; below two stages that decide before, each way of these with either."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), Stage(6, decides), Stage(6, decides), nn.Conv2d(8, 4, 1)
    ).double()
    assert _traces(monkeypatch, model) == expected


def test_parts_that_return_another_shape_decide_with_their_callers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each way of two that decide together; the drop paths before need no trace of their own."""
    net = Net(_doubled, Doubled)
    net.other = Stage(6, decides=False)
    assert _traces(monkeypatch, net.double()) == 4


class Many(nn.Module):
    """Asks for the modes of many parts in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.parts = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W]."""
        x = self.first(x)
        for part in self.parts:
            x = part(x) if part.training else x * 2
        return x


def test_more_combinations_than_can_be_told_are_refused_by_name() -> None:
    model = randomise(Many()).double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    for training in (False, True):
        model.train(training)
        assert_same(prepared.train(training), model, f"training={training}")
    prepared.get_submodule("parts.3").training = False
    with pytest.raises(AssumptionError, match=r"'parts\.3', .* all in train mode or all in eval mode"):
        prepared(IMAGE)


def test_what_train_sets_itself_follows_the_model() -> None:
    class Sets(Net):
        def train(self, mode: bool = True) -> Any:
            self.scale = 2.0 if mode else 1.0
            return super().train(mode)

    model = randomise(Sets(lambda net, h: net.sub(h) * net.scale, DropPath)).double()
    prepared = smcp_fx.prepare(model, IMAGE, config=CONFIG)
    for training in (False, True):
        assert_same(prepared.train(training), model.train(training), f"training={training}")
