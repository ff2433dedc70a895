"""Parts of any name, of subclassed layers, and with weights that Python reads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smcp_fx
from smcp_fx.errors import CheckpointError


class Stop(nn.Module):
    """Cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 1e9 else x


class OwnConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 1.0, self.bias, padding=1)


class OwnNorm(nn.BatchNorm2d):
    pass


def convs(given: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def subclassed(given: int) -> nn.Sequential:
    return nn.Sequential(
        OwnConv(given, 8, 3), OwnNorm(8), nn.ReLU(), OwnConv(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 1)
    )


def in_a_row(names: tuple[str, str, str], part: object = convs) -> nn.Sequential:
    model = nn.Sequential()
    for name, module in zip(
        names, (convs(3), Stop(), subclassed(8) if part is subclassed else convs(8)), strict=True
    ):
        model.add_module(name, module)
    return model


def masked_and_sliced(model: nn.Module, x: Tensor) -> None:
    """Masks at half of every group, then the sliced model against the masked one, in another batch."""
    prepared = smcp_fx.prepare(model.eval(), x)
    torch.testing.assert_close(prepared(x), model(x))
    free = [group for group in prepared.channels.groups if group.free]
    assert free
    prepared.set_masks({group.name: torch.arange(group.size) % 2 == 0 for group in free})
    smaller = smcp_fx.convert(prepared)
    images = torch.cat([x, x + 1, x - 1])
    torch.testing.assert_close(smaller(images), prepared(images), rtol=1e-4, atol=1e-5)
    assert list(smaller.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("names", [("0", "1", "2"), ("a b", "s", "3x3-conv"), ("self", "s", "block(0)")])
def test_parts_of_any_name(names: tuple[str, str, str]) -> None:
    masked_and_sliced(in_a_row(names), torch.randn(2, 3, 8, 8))


def test_subclassed_layers_in_parts() -> None:
    masked_and_sliced(in_a_row(("0", "1", "2"), subclassed), torch.randn(2, 3, 8, 8))


#: Keywords, what generated code uses itself, what Python would read otherwise, and what would end a string.
NAMES = [
    "for",
    "class",
    "None",
    "self",
    "a'b",
    'a"b',
    "a\nb",
    "a\\",
    "{a}",
    "\ufb01x",
    'x"), print("read as code',
]


class CalledSelf(nn.Module):
    """The call's own node would be named as the code names the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.add_module("self", nn.Conv2d(8, 8, 1))
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.get_submodule("self")(self.first(x)))
        return y


def test_a_layer_called_self() -> None:
    model, x = CalledSelf(), torch.randn(2, 3, 8, 8)
    masked_and_sliced(model, x)
    smaller = smcp_fx.convert(smcp_fx.prepare(model, x))
    for other in (copy.deepcopy(smaller), pickle.loads(pickle.dumps(smaller))):
        assert torch.equal(other(x), smaller(x))


def named(name: str) -> nn.Sequential:
    """The name at the top, and inside a part."""
    model = nn.Sequential()
    model.add_module(name, convs(3))
    model[0].add_module(name, nn.Conv2d(8, 8, 1))
    model.add_module("last", nn.Conv2d(8, 4, 3))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = named(name), torch.randn(2, 3, 8, 8)
    masked_and_sliced(model, x)
    masked_and_sliced(in_a_row((name, "s", "last")), x)
    masked_and_sliced(in_a_row(("first", name, "last")), x)
    smaller = smcp_fx.convert(smcp_fx.prepare(model, x))
    for other in (copy.deepcopy(smaller), pickle.loads(pickle.dumps(smaller)), smcp_fx.prepare(smaller, x)):
        torch.testing.assert_close(other.eval()(x), smaller(x))
    assert "read as code" not in capsys.readouterr().out


def test_onnx_files_hold_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = nn.Sequential(), torch.randn(2, 3, 8, 8)
    for name in NAMES:
        model.add_module(name, nn.Sequential())
        model[-1].add_module(name, nn.Conv2d(8 if len(model) > 1 else 3, 8, 1))
    model.add_module("last", nn.Conv2d(8, 4, 3))
    smaller = smcp_fx.convert(smcp_fx.prepare(model.eval(), x))
    smcp_fx.export_onnx(smaller, x, tmp_path / "model.onnx")  # runs it, and compares
    assert "read as code" not in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_them_or_say_that_they_do_not(name: str, tmp_path: Path) -> None:
    x, path = torch.randn(2, 3, 8, 8), tmp_path / "model.safetensors"
    smaller = smcp_fx.convert(smcp_fx.prepare(named(name).eval(), x))
    if name.isascii() and not set(name) & set("'\"\n\\"):
        torch.testing.assert_close(smcp_fx.load(smcp_fx.save(smaller, path))(x), smaller(x))
    else:  # another reader of the file may write them into code
        with pytest.raises(
            CheckpointError, match="is not a path that a saved model may hold; name modules with"
        ):
            smcp_fx.save(smaller, path)
        assert not list(tmp_path.iterdir())


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.s, self.b = convs(3), Stop(), convs(8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.s(self.a(x))
        if float(first.detach().sum()) < 1e9:
            first = first + F.conv2d(first, self.a[2].weight, padding=1)
        return self.b(first)


def test_weights_that_python_reads_stay() -> None:
    model, x = ReadsWeights(), torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x)
    assert prepared.regions == ("b",)
    assert "reads its weights" in prepared.untraced["a"]
    masked_and_sliced(model, x)
