"""Modules that TorchScript compiled are Python again once prepared."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from models import IMAGE, Net, between, conv, conv_bn, random_masks, randomise, run
from test_trace_state import same
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.:FutureWarning",
    "ignore:.torch.jit.:DeprecationWarning",
    "ignore:The TorchScript type system",
)


def doubled(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, scale_factor=float(size), mode="nearest")


class Body(nn.Module):
    """Layers in a loop, a branch, a method, a function, an attribute, parts of tensors, and the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = conv_bn(8, 8), conv(16, 8, 1)
        self.towers = nn.ModuleList([conv(8, 8), nn.Sequential(conv(8, 8, groups=2), nn.Dropout(0.0))])
        self.scale, self.gain = nn.Parameter(torch.ones(8, 1, 1)), 0.5

    def added(self, x: Tensor, other: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (as scripts take it)
        """A method of its own."""
        return x * self.gain if other is None else x + other

    def forward(self, x: Tensor, shift: float = 0.25) -> Tensor:
        """Features of the shape that came."""
        x = self.stem(x)
        outputs = []
        for tower in self.towers:
            outputs.append(tower(x))
        y = self.down(torch.cat(outputs, 1))
        if y.shape[2] % 2 == 0:
            y = doubled(y, 2)[:, :, ::2, ::2]
        a, b = y.chunk(2, 1)
        y = torch.cat([b, a], 1) * self.scale + shift
        for turn in range(2):
            y = self.added(y, x * float(turn))
        if self.training:
            y = y * 1.5
        return F.relu(self.added(y))


class Sequences(nn.Module):
    """Layers whose constructors prepare more than they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.columns, self.norm = nn.GRU(16, 8, batch_first=True), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Positions one after the other."""
        y = x.flatten(2).transpose(1, 2)
        y, _ = self.rows(y)
        y, _ = self.columns(y)
        y = self.norm(y + self.attention(y, y, y)[0])
        return y.transpose(1, 2).reshape(x.shape)


def loaded(script: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(script, file)
    return torch.jit.load(io.BytesIO(file.getvalue()))


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module.eval(), torch.randn(2, 8, 8, 8, dtype=torch.float64))


def plain() -> nn.Module:
    """What traces hold as one call of an operation, with sizes of their own."""
    return nn.Sequential(
        conv_bn(8, 8, groups=2), nn.Upsample(scale_factor=2), nn.PReLU(8), nn.Conv2d(8, 8, 2, 2)
    )


FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "scripted": (Body, torch.jit.script),
    "loaded": (Body, lambda module: loaded(torch.jit.script(module))),
    "of sequences": (Sequences, lambda module: loaded(torch.jit.script(module))),
    "traced": (plain, traced),
    "traced and loaded": (plain, lambda module: loaded(traced(module))),
}


@pytest.mark.parametrize("form", FORMS)
def test_scripted_parts_are_free_and_are_sliced_exactly(form: str) -> None:
    build, compiled = FORMS[form]
    model = randomise(between(lambda s, h: s.body(h), body=build())).double().eval()
    model.body = compiled(model.body)
    image = torch.randn(IMAGE, dtype=torch.float64)
    prepared = smcp_fx.prepare(model, image, config=smcp_fx.PruningConfig(multiple=1))
    assert prepared.channels.free_share == 1.0 and {*prepared.state_dict()} >= {*model.state_dict()}
    assert_close(run(prepared, (image,)), run(model, (image,)), "identity", form)
    prepared.set_masks(random_masks(prepared, 0))
    assert_close(run(smcp_fx.convert(prepared), (image,)), run(prepared, (image,)), "slicing", form)


def test_a_script_trains_as_what_it_was_made_of_and_takes_keywords() -> None:
    model = Net(
        lambda s, x: s.out(s.body(s.stem(x), shift=0.5)), stem=conv(3, 8), body=Body(), out=conv(8, 4)
    )
    other = copy.copy(model)
    other._modules = {**model._modules, "body": torch.jit.script(copy.deepcopy(model.body))}
    same(model, smcp_fx.prepare(other, torch.randn(IMAGE)), torch.randn(IMAGE))


def test_a_whole_model_may_be_a_script() -> None:
    model = nn.Sequential(conv_bn(3, 8), Body(), conv(8, 4)).eval()
    image = torch.randn(IMAGE)
    prepared = smcp_fx.prepare(loaded(torch.jit.script(model)), image)
    assert prepared.channels.free_share == 1.0
    torch.testing.assert_close(prepared(image), model(image))


class Unreadable(nn.Module):
    """What no Python is written of here."""

    def __init__(self) -> None:
        super().__init__()
        self.mid = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Write something down."""
        print(x.dim())
        return F.relu(self.mid(x))


def test_what_cannot_be_read_stays_and_says_so() -> None:
    compiled = torch.jit.script(Unreadable())
    prepared = smcp_fx.prepare(between(lambda s, h: s.mid(h), mid=compiled), torch.randn(IMAGE))
    (why,) = {why for _, why, _ in prepared.channels.units.why.texts if "compiled" in why}
    assert why.startswith("'mid' is compiled by torch.jit, and its script cannot be written as Python")
    with pytest.raises(InputError, match=r"compiled by torch\.jit, and its script cannot be written"):
        smcp_fx.prepare(torch.jit.script(nn.Sequential(conv(3, 8), Unreadable())), torch.randn(IMAGE))


def test_a_script_that_is_named_as_a_leaf_stays() -> None:
    model = between(lambda s, h: s.mid(h), mid=torch.jit.script(conv(8, 8)))
    assert smcp_fx.prepare(model, torch.randn(IMAGE), leaves=["mid"]).channels.free_share < 1
