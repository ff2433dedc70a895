"""Repair of every kind of layer and model, where what was removed follows from what is left: it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import chain, random_masks, randomise
from models_mixed import (
    linear_of_mixed_rows,
    mixture_of_flat_kernels,
    transposed_mixture,
    weights_of_all_images_together,
)
from tolerances import assert_close
from torch import Tensor, nn

import smcp_fx
from smcp_fx.errors import InputError

SMALL = smcp_fx.PruningConfig(multiple=1)


class Functional(nn.Module):
    """Convolutions and a linear called as functions, on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.two = nn.Parameter(torch.randn(6, 8, 3, 3))
        self.head = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, self.one, self.bias, padding=1))
        return F.linear(F.conv2d(y, self.two, stride=2).relu().mean((2, 3)), self.head)


class Shared(nn.Module):
    """One convolution that reads the outputs of two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.both = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.one(x).relu()) + self.both(self.two(x).relu())


class Joined(nn.Module):
    """Two producers side by side in one consumer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.last = nn.Conv2d(16, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.one(x), self.two(x)], 1).relu())


class Regions(nn.Module):
    """Two parts with Python between them and behind them that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3))
        self.body = nn.Sequential(nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if y.mean() > 1e6:
            y = -y
        y = self.body(y)
        return y if y.mean() < 1e6 else -y


def _grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2))


def _depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8),
        nn.Conv2d(8, 5, 1),
    )  # fmt: skip


def _transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.ConvTranspose2d(8, 5, 3, stride=2, padding=1))


#: Networks of whose groups of 8 units the second half are made copies of the first; offsets are within a group of a
#: grouped convolution.
KINDS: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional, "shared": Shared, "concatenation": Joined, "regions": Regions,
    "depthwise": _depthwise, "transposed": _transposed, "chain": lambda: chain(8, 8),
}  # fmt: skip


def _doubled(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor[4:8] = tensor[:4]


def _images(count: int = 48) -> Tensor:
    return torch.randn(count, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_made_up_for_exactly(name: str) -> None:
    model = randomise(KINDS[name]()).double().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() and tensor.shape[0] == 8:
            _doubled(tensor)
    prepared = smcp_fx.prepare(model, _images(2), config=SMALL)
    free = [group for group in prepared.channels.groups if group.free]
    half = {g.name: torch.arange(8) < 4 for g in free if g.size == 8}
    assert half
    prepared.set_masks(half)
    smaller = smcp_fx.convert(prepared)
    new = _images()
    expected = model(new)
    assert (smaller(new) - expected).norm() > 0.01 * expected.norm()
    report = smcp_fx.repair(smaller, prepared, [_images(), _images()])
    assert_close(smaller(new), expected, "regression", name)
    assert any(layer.repaired for layer in report.layers)


def test_copies_in_a_grouped_convolution() -> None:
    """Units there are pairs of equal offset in the two groups."""
    model = randomise(_grouped()).double().eval()
    first = model[0]
    with torch.no_grad():
        for tensor in (first.weight, first.bias):
            tensor[2:4], tensor[6:8] = tensor[:2].clone(), tensor[4:6].clone()
    prepared = smcp_fx.prepare(model, _images(2), config=SMALL)
    (group,) = [g for g in prepared.channels.groups if g.free]
    prepared.set_masks({group.name: torch.arange(group.size) < 2})
    smaller = smcp_fx.convert(prepared)
    smcp_fx.repair(smaller, prepared, [_images()])
    new = _images()
    assert smaller(new).shape == model(new).shape
    assert_close(smaller(new), model(new), "regression")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_and_comes_nearer(dtype: torch.dtype) -> None:
    model = randomise(chain(16, 24)).to(dtype).eval()
    x = torch.randn(64, 3, 8, 8, dtype=dtype)
    prepared = smcp_fx.prepare(model, x[:2], config=SMALL, check=False)
    prepared.set_masks(random_masks(prepared, 0, 0.7))
    smaller = smcp_fx.convert(prepared, check=False).eval()
    expected, before = model(x), smaller(x)
    smcp_fx.repair(smaller, prepared, [x])
    assert {t.dtype for t in smaller.state_dict().values() if t.is_floating_point()} == {dtype}
    assert (smaller(x) - expected).float().norm() < 0.8 * (before - expected).float().norm()


def _pruned(model: nn.Module, example: Tensor) -> tuple[smcp_fx.PreparedModel, nn.Module]:
    """Prepared and pruned; the model itself becomes one of random statistics, in eval mode."""
    prepared = smcp_fx.prepare(randomise(model).double().eval(), example, config=SMALL)
    prepared.set_masks(random_masks(prepared, 0, 0.6))
    return prepared, smcp_fx.convert(prepared).eval()


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_constant_inputs_do_no_harm(value: float) -> None:
    x = torch.full((16, 3, 8, 8), value, dtype=torch.float64)
    model = chain(12, 16)
    prepared, smaller = _pruned(model, x[:2])
    expected = model(x).detach()
    before = (smaller(x) - expected).norm()
    report = smcp_fx.repair(smaller, prepared, [x])
    assert all(bool(torch.isfinite(t).all()) for t in smaller.state_dict().values())
    assert all(layer.after <= layer.before for layer in report.layers)
    assert (smaller(x) - expected).norm() <= before


def test_fewer_positions_than_inputs_are_told_and_fitted_with_more_ridge() -> None:
    """Five rows of noise for 200 inputs: weights may not run away after them."""
    model = nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 3))
    x = torch.randn(6, 10).double()
    prepared, smaller = _pruned(model, x[:2])
    new = torch.randn(500, 10).double()
    expected = model(new).detach()
    before = (smaller(new) - expected).norm()
    report = smcp_fx.repair(smaller, prepared, [x])
    assert "6 positions for" in str(report)
    assert (smaller(new) - expected).norm() < 1.5 * before


def test_one_image_is_too_few_and_told() -> None:
    x = torch.randn(1, 3, 8, 8).double()
    prepared, smaller = _pruned(chain(8, 12), x)
    before = {name: t.clone() for name, t in smaller.named_parameters()}
    with pytest.raises(InputError, match="two images or more"):
        smcp_fx.repair(smaller, prepared, [x])
    assert all(torch.equal(t, before[name]) for name, t in smaller.named_parameters())


class Logs(nn.Module):
    """NaN behind the first layer for images that are dark enough."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two((self.one(x).relu() + 1 + x.amin((1, 2, 3), keepdim=True)).log()))


def test_activations_that_are_not_finite_are_told_and_change_nothing() -> None:
    model = randomise(Logs()).double().eval()
    x = torch.rand(16, 3, 8, 8).double()
    prepared = smcp_fx.prepare(model, x[:2], config=SMALL)
    prepared.set_masks(random_masks(prepared, 0, 0.6))
    smaller = smcp_fx.convert(prepared)
    before = {name: t.clone() for name, t in smaller.state_dict().items()}
    with pytest.raises(InputError, match="NaN or infinite"):
        smcp_fx.repair(smaller, prepared, [x, x - 9])
    assert all(torch.equal(t, before[name]) for name, t in smaller.state_dict().items())


def test_batches_of_other_sizes_are_taken_together() -> None:
    x = torch.randn(24, 3, 8, 8).double()
    model = chain(12, 16)
    prepared, smaller = _pruned(model, x[:2])
    expected = model(x).detach()
    before = (smaller(x) - expected).norm()
    smcp_fx.repair(smaller, prepared, [x[:10], torch.randn(9, 3, 12, 10).double(), x[10:]])
    assert (smaller(x) - expected).norm() < before


class Pieces(Regions):
    """Calls its body once an image in the list."""

    def forward(self, images: Any) -> Any:
        return [super(Pieces, self).forward(image) for image in images]


def test_regions_called_otherwise_than_in_the_example_are_told() -> None:
    model = randomise(Pieces()).double().eval()
    x = _images(4)
    prepared = smcp_fx.prepare(model, ([x[:2], x[2:]],), config=SMALL)
    prepared.set_masks(random_masks(prepared, 0, 0.6))
    smaller = smcp_fx.convert(prepared)
    smcp_fx.repair(smaller, prepared, [(([x, x],), None)])
    with pytest.raises(InputError, match="the 4 calls of the example"):
        smcp_fx.repair(smaller, prepared, [(([x, x, x],), None)])


def test_what_was_not_made_of_this_model_is_refused() -> None:
    x = torch.randn(4, 3, 8, 8).double()
    prepared, smaller = _pruned(chain(8, 12), x[:2])
    prepared.set_masks(random_masks(prepared, 1, 0.6))
    with pytest.raises(InputError, match="convert it again"):
        smcp_fx.repair(smaller, prepared, [x])


@pytest.mark.parametrize(
    "made",
    [weights_of_all_images_together, mixture_of_flat_kernels, linear_of_mixed_rows, transposed_mixture],
)
def test_layers_that_make_a_weight_are_left_as_they_were(made: Callable[[], nn.Module]) -> None:
    model, batches = made().eval(), [torch.randn(8, 3, 8, 8) for _ in range(4)]
    prepared = smcp_fx.prepare(model, batches[0], target=0.6, config=SMALL)
    prepared.set_masks(random_masks(prepared, 0, 0.6))
    smaller = smcp_fx.convert(prepared).eval()
    before = (smaller(batches[0]) - model(batches[0])).norm()
    report = smcp_fx.repair(smaller, prepared, batches)
    assert (smaller(batches[0]) - model(batches[0])).norm() < before
    if made is weights_of_all_images_together:
        assert {layer.path: layer.left for layer in report.layers}[
            "hyper"
        ] == "its outputs are mixed into a weight"
