"""Models whose top cannot be traced: split into regions, pruned across them, and exact; modules kept as leaves."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from models import randomise
from region_models import CONFIG, IMAGES, Split, check_exact, conv, group, outputs, prepare
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError, TraceError


class Reads(Split):
    def between(self, f: Tensor) -> Tensor:
        self.seen = float(f.mean())
        return f


class Changes(Split):
    def between(self, f: Tensor) -> Tensor:
        f += 1
        return f


class Trains(Split):
    """Reads the stem's output while training only."""

    def between(self, f: Tensor) -> Tensor:
        if self.training:
            self.seen = f.square().mean()
        return f


class Pyramid(nn.Module):
    """A backbone that returns a dict, and a head that runs once a level, as detection models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Levels()
        self.head = PerLevel()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        levels = self.backbone(torch.stack(images))
        boxes, *rest = self.head(list(levels.values()), names=list(levels))
        scores = torch.cat([boxes, *rest], 1)
        if scores.amax() > 1e6:
            raise ValueError("diverged")
        found = []
        for index in range(len(images)):
            keep = scores[index].amax(1) > -1e6
            found.append({"scores": scores[index][keep]})
        return found


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 8), conv(8, 8, 2)
        self.across = nn.ModuleList([nn.Conv2d(8, 6, 1), nn.Conv2d(8, 6, 1)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.one(x)
        return {"0": self.across[0](first), "1": self.across[1](self.two(first))}


class PerLevel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = conv(6, 10)
        self.out = nn.Conv2d(10, 4, 1)

    def forward(self, features: list[Tensor], names: list[str]) -> list[Tensor]:
        assert len(features) == len(names)
        return [self.out(self.shared(f)).permute(0, 2, 3, 1).flatten(1, 2) for f in features]


def test_regions_are_joined_where_tensors_go_straight() -> None:
    model = Split()
    prepared = prepare(model)
    assert prepared.regions == ("stem", "body", "head")
    assert_close(outputs(prepared, (IMAGES,)), outputs(model, (IMAGES,)), "identity", "all channels kept")
    stem = group(prepared, "stem.0")
    assert stem.free
    assert stem.consumers == ("body.0.0",)
    assert group(prepared, "body.0.0").free
    last = group(prepared, "body.1.0")
    assert last.pinned == ("leaves the traced regions for code that was not traced",)
    # 12 + 16 of the 12 + 16 + 20 input channels; the 3 of the images come from Python, too
    assert prepared.channels.free_share == pytest.approx(28 / 51)
    for seed in range(3):
        sliced = check_exact(prepared, (IMAGES,), seed)
        kept = prepared.pruner.counts
        assert sliced.stem[0].out_channels == sliced.body[0][0].in_channels == kept["stem.0"]
        assert type(sliced) is Split


def test_the_reason_says_which_module_stopped_it_and_where() -> None:
    why = prepare(Split()).untraced[""]
    line = next(
        number
        for number, text in enumerate(Path(inspect.getfile(Split)).read_text().splitlines(), start=1)
        if "if y.mean() > 1e6" in text
    )
    assert f"region_models.py:{line} (if y.mean() > 1e6" in why

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Split()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).relu()

    prepared = prepare(Outer())
    assert prepared.regions == ("inner.stem", "inner.body", "inner.head")
    assert (
        f"It stopped in module 'inner' (Split), at {inspect.getfile(Split)}:{line}" in prepared.untraced[""]
    )
    check_exact(prepared, (IMAGES,))


@pytest.mark.parametrize("kind", [Reads, Changes, Trains])
def test_what_python_reads_between_regions_stays(kind: type[Split]) -> None:
    prepared = prepare(kind())
    assert not group(prepared, "stem.0").free
    assert group(prepared, "body.0.0").free
    check_exact(prepared, (IMAGES,))


def test_probing_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = randomise(Split()).double()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    prepared = smcp_fx.prepare(model, (IMAGES,), config=CONFIG)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)
        assert torch.equal(prepared.state_dict()[name], tensor)
    assert "forward" not in vars(model.stem)


def test_dicts_lists_keywords_and_levels() -> None:
    images = ([IMAGES[0], IMAGES[1]],)
    model = Pyramid()
    prepared = prepare(model, images)
    assert prepared.regions == ("backbone", "head")
    assert_close(outputs(prepared, images), outputs(model, images), "identity", "all channels kept")
    levels = group(prepared, "backbone.across.0")
    assert levels.free and set(levels.producers) == {"backbone.across.0", "backbone.across.1"}
    assert group(prepared, "head.shared.0").free
    for seed in range(3):
        check_exact(prepared, images, seed)
    larger = ([torch.randn(3, 24, 20).double() for _ in range(3)],)  # another batch, another resolution
    check_exact(prepared, larger, 7)


def test_cost_counts_every_call_once_an_image() -> None:
    model = randomise(Pyramid()).double().eval()
    total = 0

    def count(module: Any, args: Any, out: Tensor) -> None:
        nonlocal total
        total += out.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    images = ([IMAGES[0], IMAGES[1]],)
    outputs(model, images)
    prepared = prepare(Pyramid(), images)
    assert prepared.pruner.full_cost == pytest.approx(total / 2)


def test_another_structure_is_refused_with_advice() -> None:
    class Chooses(Pyramid):
        levels = 2

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            features = list(self.backbone(torch.stack(images)).values())[: self.levels]
            out = self.head(features, names=["a", "b"][: self.levels])
            return [{"scores": o} for o in out if o.amax() < 1e6]

    prepared = prepare(Chooses(), ([IMAGES[0]],))
    prepared.python.levels = 1  # type: ignore[attr-defined]
    words = r"'head' runs as a graph, traced with .*tensor, tensor.*; it is now called with \(\[tensor\]"
    with pytest.raises(InputError, match=words):
        outputs(prepared, ([IMAGES[0]],))


def test_weights_that_python_uses_too_are_left_alone() -> None:
    class Ties(Split):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.ParameterList([self.stem[0].weight])

    prepared = prepare(Ties())
    assert prepared.regions == ("body", "head")
    assert prepared.untraced["stem"] == "it shares weights with a module that is not traced"
    check_exact(prepared, (IMAGES,))


def test_where_nothing_may_go_the_first_error_stands() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            return self.two(y if y.mean() > -1e6 else -y)

    with pytest.raises(TraceError, match=r"cannot trace Single.*It stopped at .*test_regions\.py") as caught:
        prepare(Single())
    assert "In the parts that can be traced ('one', 'two') no channel may go" in str(caught.value)


def test_what_the_example_gives_nothing_stays() -> None:
    class Finds(Split):
        """Crops what it finds, and in the example it finds nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.crops = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1))

        def forward(self, x: Tensor) -> Any:
            found = x[[i for i in range(len(x)) if float(x[i].max()) > 1e6]]
            return super().forward(x), self.crops(found)

    prepared = prepare(Finds())
    assert "crops" not in prepared.regions
    assert "empty, of shape (0, 3," in prepared.untraced["crops"]
    check_exact(prepared, (IMAGES,))
