"""What forward keeps in plain attributes for its next call, prepared and sliced networks keep, too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import TraceError


class _Network(nn.Module):
    """Three convolutions; `between` may keep what it likes."""

    state: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(16, 4, 1)
        self.state = None
        self.mean = torch.zeros(1)
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.between(self.a(x).relu())))
        return y

    def between(self, y: Tensor) -> Tensor:
        return y


class _FromNone(_Network):
    def between(self, y: Tensor) -> Tensor:
        if self.state is None:
            self.state = torch.zeros_like(y)
        self.state = 0.5 * self.state + y
        return self.state


class _FromATensor(_Network):
    def between(self, y: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + y.mean()
        return y * self.mean


class _InPlace(_Network):
    def between(self, y: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(y.detach().mean())
        return y * self.mean


class _InAList(_Network):
    def between(self, y: Tensor) -> Tensor:
        self.history.append(y.detach().mean())
        return y + torch.stack(self.history).sum()


class _InTrainMode(_Network):
    def between(self, y: Tensor) -> Tensor:
        if not self.training:
            return y
        before, self.state = self.state, y.detach()
        return y if before is None else y + before.mean()


class _InAModule(_Network):
    def __init__(self) -> None:
        super().__init__()
        self.memory = _Memory()

    def between(self, y: Tensor) -> Tensor:
        kept: Tensor = self.memory(y)
        return kept


class _Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, y: Tensor) -> Tensor:
        self.state = y if self.state is None else 0.5 * self.state.detach() + y
        return self.state


class _OnlyShown(_Network):
    """What it keeps is for others to look at: no call reads it."""

    def between(self, y: Tensor) -> Tensor:
        self.state = y
        self.history.append(y.mean())
        return y + self.history[-1]


READ = [_FromNone, _FromATensor, _InPlace, _InAList, _InTrainMode, _InAModule]


def _prepared(make: Callable[[], nn.Module]) -> tuple[nn.Module, smcp_fx.PreparedModel, Tensor]:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(2, 3, 8, 8).double()
    model.mean = torch.zeros(1).double()
    prepared = smcp_fx.prepare(copy.deepcopy(model).eval(), x, target=0.8)
    return model, prepared, x


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [*READ, _OnlyShown])
def test_later_calls_give_what_the_model_gives(make: Callable[[], nn.Module], training: bool) -> None:
    model, prepared, x = _prepared(make)
    model.train(training)
    prepared.train(training)
    for factor in (1, 2, 3):
        torch.testing.assert_close(prepared(factor * x), model(factor * x))


@pytest.mark.parametrize("make", READ)
def test_so_does_the_sliced_network(make: Callable[[], nn.Module]) -> None:
    _, prepared, x = _prepared(make)
    free = [group for group in prepared.channels.groups if group.free]
    assert free
    prepared.set_masks({group.name: torch.arange(group.size) % 2 == 0 for group in free})
    converted = smcp_fx.convert(prepared.eval())
    for factor in (1, 2, 3):
        torch.testing.assert_close(converted(factor * x), prepared(factor * x))


def test_what_no_call_reads_keeps_nothing_in_place() -> None:
    assert _prepared(_OnlyShown)[1].channels.free_share == 1.0


def test_the_reason_is_told() -> None:
    _, prepared, _ = _prepared(_FromNone)
    assert "keeps tensors from one call" in prepared.untraced[""]
    with pytest.raises(TraceError, match="keeps tensors from one call"):
        smcp_fx.prepare(_Memory(), torch.randn(1, 3, 8, 8))
