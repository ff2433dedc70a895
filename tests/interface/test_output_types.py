"""What a model returns keeps its class, prepared and converted."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError

Pair = namedtuple("Pair", "logits features")


@dataclass
class Fields:
    logits: Tensor
    features: Tensor | None = None


@dataclass
class Both(OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is a dictionary of the fields which are not None."""

    logits: Tensor
    loss: Tensor | None = None
    hidden: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("logits", "loss", "hidden"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


MAKERS: dict[str, Any] = {
    "namedtuple": lambda z, y: Pair(z, y),
    "dataclass": lambda z, y: Fields(z, y),
    "OrderedDict": lambda z, y: OrderedDict(out=z, aux=y),
    "model output": lambda z, y: Both(z, hidden=(y, OrderedDict(last=y))),
    "named tuple in a dataclass": lambda z, y: Fields(Pair(z, y), {"last": [y]}),
    "named tuples in a list": lambda z, y: [Pair(z, y), Pair(y, None)],
    "nested": lambda z, y: {"out": [OrderedDict(z=z)], "pair": (y, None)},
}


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x).relu()).relu()
        return MAKERS[self.kind](self.c(y), y.mean((2, 3)))


def unfolded(value: Any) -> Any:
    """(class, contents) all the way down."""
    if isinstance(value, dict):
        return type(value), [(key, unfolded(part)) for key, part in value.items()]
    if isinstance(value, Fields):
        return Fields, unfolded((value.logits, value.features))
    if isinstance(value, (tuple, list)):
        return type(value), [unfolded(part) for part in value]
    return value


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    elif isinstance(expected, (tuple, list)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_classes_stay(kind: str) -> None:
    model, x = Returns(kind).eval(), torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x)
    assert not prepared.regions
    assert_same(unfolded(prepared(x)), unfolded(model(x)))
    prepared.set_masks({g.name: torch.arange(g.size) % 2 == 0 for g in prepared.channels.groups if g.free})
    smaller = smcp_fx.convert(prepared)
    more = torch.randn(3, 3, 8, 8)
    assert_same(unfolded(smaller(more)), unfolded(prepared(more)))
    assert_same(unfolded(copy.deepcopy(smaller)(more)), unfolded(prepared(more)))


def test_fields_and_keys_of_a_model_output() -> None:
    prepared = smcp_fx.prepare(Returns("model output").eval(), torch.randn(2, 3, 8, 8))
    found = smcp_fx.convert(prepared)(torch.randn(1, 3, 8, 8))
    assert found.logits is found["logits"] and found.loss is None and list(found) == ["logits", "hidden"]


def plain(value: Any) -> Any:
    """What is left of it in a file."""
    if isinstance(value, Fields):
        return {"logits": plain(value.logits), "features": plain(value.features)}
    if isinstance(value, dict):
        kind = OrderedDict if type(value) is OrderedDict else dict
        return kind((key, plain(part)) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(plain(part) for part in value)
    return value


@pytest.mark.parametrize("kind", MAKERS)
def test_a_file_holds_plain_containers_and_says_so(kind: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = smcp_fx.convert(smcp_fx.prepare(Returns(kind).eval(), x, target=1.0))
    path = tmp_path / "model.safetensors"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        smcp_fx.save(model, path)
    expected = model(x)
    lost = sorted({name for name in LOST if name in str(unfolded(expected))})
    assert [str(warning.message).count("in place of") for warning in told] == [len(lost)] * bool(lost)
    for name in lost:
        assert f"{LOST[name]} in place of {__name__}.{name}" in str(told[0].message)
    assert_same(unfolded(smcp_fx.load(path)(x)), unfolded(plain(expected)))
    # A pickle is code anyway: it keeps them.
    assert_same(unfolded(pickle.loads(pickle.dumps(model))(x)), unfolded(expected))


LOST = {"Pair": "a tuple", "Fields": "a dict", "Both": "a dict"}


class ByMode(nn.Module):
    """Returns more while it trains, in one class."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).relu()
        return Fields(self.b(y), self.c(y)) if self.training else Fields(self.b(y))


def test_in_both_modes(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = smcp_fx.convert(smcp_fx.prepare(ByMode(), x, target=1.0))
    with pytest.warns(UserWarning, match="a dict in place of"):
        loaded = smcp_fx.load(smcp_fx.save(model, tmp_path / "model.safetensors"))
    for training in (False, True):
        assert_same(unfolded(loaded.train(training)(x)), unfolded(plain(model.train(training)(x))))


def test_a_prepared_model_is_not_exported(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), torch.randn(2, 3, 8, 8)
    prepared = smcp_fx.prepare(model, x)
    with pytest.raises(InputError, match=r"smcp_fx\.convert"):
        smcp_fx.export_onnx(nn.DataParallel(prepared), x, tmp_path / "n.onnx")
    assert not list(tmp_path.iterdir())
