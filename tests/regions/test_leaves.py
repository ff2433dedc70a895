"""Modules kept as leaves: called as they were, and pinning what they touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import chain, random_masks, randomise
from region_models import IMAGES, Split, check_exact, conv, group, prepare
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) if x.mean() > -1e6 else x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(3, 24), conv(24, 16))
        self.gate = Gate()
        self.last = nn.Sequential(conv(16, 24), nn.Conv2d(24, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


def test_a_leaf_stays_and_pins_what_it_touches() -> None:
    prepared = prepare(Gated(), leaves=["gate"])
    assert prepared.regions == ()
    assert group(prepared, "first.1.0").pinned == ("'gate' is left as it is",)
    assert group(prepared, "first.0.0").free and group(prepared, "last.0.0").free
    assert not any("gate" in layer.path for layer in prepared.channels.layers)
    sliced = check_exact(prepared, (IMAGES,))
    assert sliced.gate.mix.weight.shape == (16, 16, 1, 1)


def test_a_layer_can_be_a_leaf_and_its_shared_weight_stays() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.last.weight = self.again.weight
            self.end = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.last(torch.relu(self.again(torch.relu(self.first(x))))))

    free = prepare(Shared())
    assert group(free, "first").free
    prepared = prepare(Shared(), leaves=["last"])
    assert not any(g.free for g in prepared.channels.groups)
    assert "'last' is left as it is" in group(prepared, "again").pinned


def test_leaves_are_kept_inside_regions_and_out_of_them() -> None:
    prepared = prepare(Split(), leaves=["head", "stem"])
    assert prepared.regions == ("body",)
    assert group(prepared, "body.0.0").free
    check_exact(prepared, (IMAGES,))

    class Deep(Split):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(conv(12, 16), conv(16, 16), Gate(), conv(16, 20))

    prepared = prepare(Deep(), leaves=["body.2"])
    assert prepared.regions == ("stem", "body", "head")
    assert group(prepared, "stem.0").free
    check_exact(prepared, (IMAGES,))


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        (["nothing"], "the model has no module 'nothing'; model.named_modules"),
        (["mix"], "did you mean gate.mix"),
        ("gate", "a list of module names, not 'gate'"),
    ],
)
def test_leaves_that_do_not_exist(leaves: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        prepare(Gated(), leaves=leaves)


class Printing(nn.Linear):
    """A layer that writes something down, which is not read back from a script."""

    def forward(self, x: Tensor) -> Tensor:
        """Linear."""
        print(x.dim())
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`:FutureWarning", "ignore:`torch.jit.script`:DeprecationWarning"
)
def test_scripted_modules_are_left_alone() -> None:
    """They take no hooks, and cannot be looked into."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = chain(6, 8)
            self.scripted = torch.jit.script(Printing(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return self.scripted(y) if float(y.detach().mean()) > -1e9 else y

    prepared = smcp_fx.prepare(Asks(), torch.randn(2, 3, 8, 8))
    assert prepared.regions == ("body",)


class CachesBySize(nn.Module):
    """Keeps a grid until the size of what it gets changes, as detection heads do."""

    shape: tuple[int, ...] = ()
    grid = torch.empty(0)  # a plain attribute, of the class at first

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, H, W]."""
        if self.shape != tuple(x.shape):
            self.grid = torch.arange(x.shape[-1], dtype=x.dtype).expand(x.shape[-2:])
            self.shape = tuple(x.shape)
        return self.conv(x) + self.grid


@pytest.mark.parametrize("called_before", [False, True])
def test_a_part_that_caches_by_size_takes_other_sizes(called_before: bool) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 3), CachesBySize()

        def forward(self, x: Tensor) -> Tensor:
            """[N, 3, H, W]."""
            y = self.head(self.stem(x))
            return y if float(y.detach().abs().amax()) < 1e9 else -y

    model = randomise(Whole()).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    if called_before:
        model(torch.randn(1, 3, 10, 10).double())
    prepared = smcp_fx.prepare(model, x, config=smcp_fx.PruningConfig(multiple=1))
    prepared.set_masks(random_masks(prepared, 0))
    sliced = smcp_fx.convert(prepared)
    for size in ((2, 3, 8, 8), (3, 3, 8, 8), (2, 3, 12, 10), (2, 3, 8, 8)):
        image = torch.randn(size).double()
        with torch.no_grad():
            assert_close(sliced(image), prepared(image), "slicing", str(size))
